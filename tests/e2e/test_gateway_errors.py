"""A bug of the gateway's own: its caller gets an opaque id, and its log one line, which has the traceback."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from e2e.cli_server import LIMIT_S

BROKEN = """
import sys
from types import SimpleNamespace
from pagecast_scheduler.gateway import app, backend, main
from pagecast_scheduler.gateway.config import GatewayConfig

async def broken(*_):
    raise LookupError("planted")

async def stream(*_):
    return SimpleNamespace(first=SimpleNamespace(accepted=SimpleNamespace(model="m")))

async def chunks(*_):
    yield b"data: begun\\n\\n"
    raise LookupError("planted")

backend.Backend.models, backend.Backend.stream, app.chunks.chat_chunks = broken, stream, chunks
config = GatewayConfig("127.0.0.1:1", http_port=0, publish=sys.argv[1], log_format="json", drain_announce_s=0.0)
sys.exit(main.run(config))
"""


@pytest.mark.parametrize("breaks_off", [False, True], ids=["before its answer", "in the midst of it"])
def test_an_unexpected_error_is_logged_once(tmp_path: Path, breaks_off: bool) -> None:
    published = tmp_path / "address"
    process = subprocess.Popen([sys.executable, "-c", BROKEN, str(published)], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + LIMIT_S
        while not published.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        with httpx.Client(base_url=published.read_text().strip(), timeout=LIMIT_S) as http:
            if breaks_off:
                asked = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                with pytest.raises(httpx.RemoteProtocolError):
                    http.post("/v1/chat/completions", json=asked)
            else:
                answer = http.get("/v1/models")
                assert answer.status_code == 500
                told = answer.json()["error"]["message"]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    (failed,) = [line for line in lines if "planted" in json.dumps(line)]
    assert failed["event"] == "unexpected error in an HTTP call" and "LookupError: planted" in failed["exception"]
    assert [line["level"] for line in lines].count("error") == 1
    assert breaks_off or told == f"internal error {failed['error_id']}"
