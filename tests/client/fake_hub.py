"""A Hugging Face hub on loopback, as far as a snapshot is fetched from it: a model's tree, and its files with ranges."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """files: by name. cut: names whose first answer ends after that many bytes. asked: (method, path, Range) of every request."""

    def __init__(self, name: str, files: dict[str, bytes], cut: dict[str, int] | None = None) -> None:
        self.name, self.files, self.cut = name, files, dict(cut or {})
        self.asked: list[tuple[str, str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self._serve(body=False)

            def do_GET(self) -> None:
                self._serve(body=True)

            def _serve(self, body: bool) -> None:
                path = self.path.split("?")[0]
                hub.asked.append((self.command, path, self.headers.get("Range", "")))
                if path == f"/api/models/{hub.name}/revision/main" or path == f"/api/models/{hub.name}":
                    self._json({"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]})
                elif path.startswith(f"/api/models/{hub.name}/tree/"):
                    self._json([hub.entry(name) for name in hub.files])
                elif (found := re.fullmatch(rf"/{hub.name}/resolve/[^/]+/(.+)", path)) and found[1] in hub.files:
                    self._file(found[1], body)
                else:
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound" if hub.name not in path else "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def _json(self, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                self.wfile.write(data)

            def _file(self, name: str, body: bool) -> None:
                data = hub.files[name]
                start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
                self.send_response(206 if start else 200)
                self.send_header("ETag", f'"{hub.etag(name)}"')
                if name.endswith(".safetensors"):
                    self.send_header("X-Linked-Etag", f'"{hub.etag(name)}"')
                    self.send_header("X-Linked-Size", str(len(data)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(data) - start))
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if not body:
                    return
                end = hub.cut.pop(name, len(data))
                self.wfile.write(data[start:end])
                self.close_connection = end < len(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def etag(self, name: str) -> str:
        data = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "path": name, "size": len(self.files[name]), "oid": self.etag(name)[:40]}
        if name.endswith(".safetensors"):
            found["lfs"] = {"oid": self.etag(name), "size": len(self.files[name]), "pointerSize": 100}
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
