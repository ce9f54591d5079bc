"""What the HTTP gateway passes on of a call's headers, and what it refuses: gRPC's metadata carries less than HTTP's headers do."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from e2e.cli_server import LIMIT_S, Served, serve


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--http-port", "0") as cluster:
        yield cluster


def asked(served: Served, *headers: bytes) -> tuple[int, str]:
    """Status and error of a request with these headers, as their bytes are."""
    host, _, port = served.http.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        connection.sendall(b"\r\n".join([b"GET /v1/models HTTP/1.1", b"Host: x", b"Connection: close", *headers, b"", b""]))
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content).get("error", {}).get("message", "")


@pytest.mark.parametrize(("headers", "status", "said"), [
    ([b"Authorization: Bearer \xff\xfe"], 400, "the header authorization must be printable ASCII"),
    ([b"Authorization: Bearer a\tb"], 400, "the header authorization must be printable ASCII"),
    (["traceparent: é".encode()], 400, "the header traceparent must be printable ASCII"),
    ([b"Authorization: Bearer a", b"Authorization: Bearer b"], 400, "authorization must be given once"),
    ([b"traceparent: 1"], 400, "traceparent must be a W3C traceparent"),
    ([b"Authorization: Bearer " + b"x" * 9000], 431, "must be at most 8192 bytes together, not 9007"),
    ([b"tracestate: " + b"a" * 8000, b"Authorization: " + b"x" * 200], 431, "must be at most 8192 bytes together, not 8200"),
    (["X-Other: é".encode(), b"X-Request-Id: \xff", b"X-Large: " + b"x" * 20_000], 200, ""),  # not passed on
])  # fmt: skip
def test_headers_that_no_metadata_can_carry_are_named(served: Served, headers: list[bytes], status: int, said: str) -> None:
    answered, message = asked(served, *headers)
    assert answered == status and said in message, message
    assert "metadata" not in message and "internal error" not in message


@pytest.mark.parametrize("letters", [1_500_000, 3_500_000], ids=["the front end says", "its transport says"])
def test_what_grows_too_large_on_its_way_is_413(served: Served, letters: int) -> None:
    """A schema is sent on as ASCII, in which a letter of two bytes has six."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "é" * letters}}}
    content = json.dumps({"messages": [{"role": "user", "content": "x"}], "response_format": schema}, ensure_ascii=False).encode()
    assert len(content) < 8 << 20
    address = f"{served.http}/v1/chat/completions"
    reply = httpx.post(address, content=content, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (413, "message_too_large", "invalid_request_error")
