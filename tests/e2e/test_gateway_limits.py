"""The HTTP gateway as a process: clients that send a byte now and then, or take nothing of their answers, do not keep connections."""

import json
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import httpx
import psutil
import pytest
from e2e.cli_server import LIMIT_S, PAGECAST

ARRIVAL_S, LARGEST = 1.0, 1 << 18
WHOLE_BODY_S = ARRIVAL_S + LARGEST / 65_536
"""Within which the gateway of these tests gets the largest body."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextmanager
def gateway(*words: str, files: tuple[int, int] | None = None) -> Iterator[int]:
    """The port of a gateway without front ends. files: its soft and hard limit on open files, where not ours."""
    command = [*PAGECAST, "gateway", "--target", "127.0.0.1:1", "--http-port", "0", "--log-format", "json", *words]
    limit = None if files is None else partial(resource.setrlimit, resource.RLIMIT_NOFILE, files)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit) as process:
        try:
            assert process.stderr is not None
            address = next(json.loads(line)["address"] for line in process.stderr if '"address"' in line)
            yield int(address.rpartition(":")[2])
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a gateway with small limits."""
    with gateway("--http-arrival-s", str(ARRIVAL_S), "--max-message-bytes", str(LARGEST), "--slow-consumer-timeout-s", "1") as made:
        yield made


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """A connection whose client takes little before it reads."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", port))
        yield made


def dripped(connection: socket.socket, begun: bytes, drip: bytes) -> tuple[bytes, float]:
    """What answers a request that goes on a piece at a time, ten a second, and after how many seconds it was there."""
    connection.sendall(begun)
    connection.settimeout(0.1)
    start, answer, crossed = time.monotonic(), b"", (ConnectionResetError, BrokenPipeError)  # what a piece meets that comes too late
    while time.monotonic() < start + LIMIT_S:
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            with suppress(*crossed):
                connection.sendall(drip)
            continue
        except crossed:
            piece = b""
        answer += piece
        if not piece:
            return answer, time.monotonic() - start
    raise AssertionError("who sends a byte now and then keeps the connection")


def test_a_head_that_drips_does_not_keep_its_connection(port: int) -> None:
    with connected(port) as connection:
        answer, after_s = dripped(connection, HEAD + b"X-Slow: ", b"a")
        assert answer == b"" and after_s > ARRIVAL_S - 0.5


@pytest.mark.parametrize(("begun", "drip", "limit_s"), [
    (HEAD + b"Content-Length: 10000\r\n\r\n", b" ", ARRIVAL_S + 10_000 / 65_536),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", WHOLE_BODY_S),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1", ARRIVAL_S),
    (b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n", b" ", ARRIVAL_S + 10_000 / 65_536),
], ids=["length", "chunks", "size of a chunk", "of a GET"])  # fmt: skip
def test_a_body_that_drips_is_answered_408(port: int, begun: bytes, drip: bytes, limit_s: float) -> None:
    with connected(port) as connection:
        answer, after_s = dripped(connection, begun, drip)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"the body did not come whole" in answer
        assert after_s > limit_s - 0.5


def test_the_largest_body_at_an_honest_rate_is_taken(port: int) -> None:
    content = json.dumps({"prompt": "x"}).encode().ljust(LARGEST)
    parts = 16
    with connected(port) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % LARGEST)
        for start in range(0, LARGEST, LARGEST // parts):
            connection.sendall(content[start : start + LARGEST // parts])
            time.sleep(2 * ARRIVAL_S / parts)
        connection.settimeout(LIMIT_S)
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")  # there is no front end that it could go to


def test_answers_that_nobody_takes_do_not_keep_their_connection(port: int) -> None:
    ask = b"GET /page/chat.js HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(port) as connection:
        connection.setblocking(False)
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            try:
                connection.send(ask)  # one after the other, until no more are taken
            except BlockingIOError:
                time.sleep(0.05)
            except (ConnectionResetError, BrokenPipeError):
                return
    raise AssertionError("a connection is kept whose client reads nothing")


@pytest.mark.parametrize(("files", "status", "taken"), [((64, 1024), b"200", 1024), ((256, 256), b"503", 256), ((64, 9999), b"200", 4192)])
def test_connections_are_as_many_as_the_system_has_files_for(files: tuple[int, int], status: bytes, taken: int) -> None:
    """A shell's own limit is less than the system's; where there is no more, a caller is told so, not hung up on. There are never more
    files than the connections that it takes: what is above them would fill its memory."""
    with gateway(files=files) as port, ExitStack() as idle:
        assert psutil.Process().children()[-1].rlimit(psutil.RLIMIT_NOFILE)[0] == taken
        for _ in range(200):
            idle.enter_context(connected(port))
        with connected(port) as last:
            last.settimeout(LIMIT_S)
            last.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert last.recv(100).startswith(b"HTTP/1.1 %s " % status)


@pytest.mark.parametrize("content", [
    b'{"prompt": "x", ' + b", ".join(b'"x%d": 1' % number for number in range(200_000)) + b"}",
    b'{"prompt": [' + b'"\\ud800", ' * 200_000 + b'"x"]}',
    b'{"prompt": "x", "logit_bias": {' + b", ".join(b'"%d": "x"' % number for number in range(200_000)) + b"}}",
    b'{"prompt": "x", "bad_words": [' + b"1, " * 200_000 + b"1]}",
], ids=["unknown fields", "halves of pairs", "biases", "words"])  # fmt: skip
def test_a_body_of_nothing_but_faults_is_answered(content: bytes) -> None:
    """Comparing each with each would take hours, in which nobody else is answered."""
    with gateway() as port:
        headers = {"Content-Type": "application/json"}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=content, headers=headers, timeout=LIMIT_S)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["message"].startswith("the body has 2000") and "too many to name" in error["message"]
