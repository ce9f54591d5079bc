"""Bytes that no client of ours would send, against a real cluster over the oracle: every answer has a status that says whose fault it is,
nothing inner leaks, memory stays, and a canary's tokens never change."""

import asyncio
import contextlib
import gzip
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h2.errors
import psutil
import pytest
from e2e.cli_server import Served, serve
from frontend.raw_http2 import Answer, RawClient, grpc_frame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagecast import Client, SamplingParams
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import tokenizer_pb2

LEAK = re.compile(r"Error\b|Exception|Traceback|\.py|/work|/tmp|object at 0x")
GENERATION, TOKENIZER = "/pagecast.v1.GenerationService", "/pagecast.v1.TokenizerService"
METHODS = (
    f"{GENERATION}/Generate", f"{GENERATION}/GenerateStream", f"{TOKENIZER}/Tokenize", f"{TOKENIZER}/Detokenize", f"{TOKENIZER}/RenderChat",
    "/pagecast.v1.ModelService/GetModel", "/pagecast.v1.RuntimeService/GetLoad", "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
)  # fmt: skip
# OK, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNIMPLEMENTED, and UNAVAILABLE with advice.
BLAMELESS = {0, 3, 4, 5, 8, 9, 12, 14}
MEBIBYTE = 1 << 20
CANARY = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)


@dataclass
class Target:
    """The cluster under fire."""

    served: Served
    client: Client
    canary: tuple[int, ...] = ()

    def frontend(self) -> psutil.Process:
        return self.served.children()["frontend"][0]

    def must_be_well(self, pid: int) -> None:
        """The same process answers, and the canary sings the same song."""
        assert self.frontend().pid == pid, "the front end was replaced"
        assert self.client.generate("canary", CANARY).token_ids == self.canary
        assert self.client.health() == "SERVING"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with serve("--executor", "oracle", "--oracle-vocab-size", "2048", "--max-model-len", "256") as served, Client(served.address) as client:
        yield Target(served, client, client.generate("canary", CANARY).token_ids)


@pytest.fixture(autouse=True)
def well(target: Target) -> Iterator[None]:
    pid = target.frontend().pid
    yield
    target.must_be_well(pid)


def ask(target: Target, method: str, body: bytes, headers: Any = (), timeout_s: int = 2, **options: Any) -> Answer:
    """timeout_s: the call's deadline, which is an answer too; long where only another one will do."""
    async def once() -> Answer:
        async with RawClient(target.served.address) as raw:
            return await raw.call(method, body, [("grpc-timeout", f"{timeout_s}S"), *headers], **options)

    return asyncio.run(once())


def check(answer: Answer, allowed: set[int] = BLAMELESS) -> None:
    assert answer.status in allowed, answer
    text = (answer.trailers | answer.headers).get("grpc-message", "")
    assert not LEAK.search(text), text


fuzz = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

VALID = {
    f"{GENERATION}/Generate": pb.GenerateRequest(
        spec=pb.GenerationSpec(
            request_id="r", prompt_token_ids=pb.TokenIds(ids=[5, 6, 7]),
            sampling=pb.SamplingOptions(temperature=1, top_k=5, top_p=0.5, seed=1),
            stopping=pb.StoppingOptions(max_output_tokens=3, stop_texts=["a"], stop_token_ids=[9]), cache=pb.CacheOptions(cache_scope="s"),
        )
    ),
    f"{TOKENIZER}/RenderChat": tokenizer_pb2.RenderChatRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])),
    f"{TOKENIZER}/Detokenize": tokenizer_pb2.DetokenizeRequest(token_ids=[1, 2, 300]),
}  # fmt: skip


EDIT = st.tuples(st.integers(0, 10**6), st.binary(max_size=3))
"""A place, and what comes there."""


@fuzz
@given(method=st.sampled_from(METHODS), message=st.binary(max_size=200))
def test_any_bytes_as_a_message(target: Target, method: str, message: bytes) -> None:
    check(ask(target, method, grpc_frame(message)))


@fuzz
@given(method=st.sampled_from(sorted(VALID)), edits=st.lists(EDIT, min_size=1, max_size=4))
def test_valid_messages_with_bytes_changed(target: Target, method: str, edits: list[tuple[int, bytes]]) -> None:
    message = VALID[method].SerializeToString()
    for place, new in edits:
        at = place % (len(message) + 1)
        message = message[:at] + new + message[at + (place // 7) % 3 :]
    check(ask(target, method, grpc_frame(message)))


@fuzz
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(["traceparent", "x-request-id", "pagecast-priority", "grpc-encoding", "x-bin", "authorization", "te"]),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_metadata(target: Target, headers: list[tuple[str, str]]) -> None:
    answer = ask(target, "/grpc.health.v1.Health/Check", grpc_frame(b""), headers)
    # Headers of gRPC's own may end the call below our code: with a reset, or a status of gRPC's.
    if answer.reset is None and answer.status is not None and not any(name.startswith(("grpc-", "te", "x-bin")) for name, _ in headers):
        check(answer)


MALFORMED = {
    "cut off in the length": b"\0\0\0", "cut off in the message": grpc_frame(b"x" * 50)[:20], "two messages": grpc_frame(b"") * 2,
    "garbage behind": grpc_frame(b"") + b"\xff" * 9, "a length of 4 GiB": struct.pack(">BI", 0, 2**32 - 1) + b"x",
    "compressed without a word of it": grpc_frame(b"x", compressed=1), "an unknown flag": grpc_frame(b"", compressed=7),
    "groups in groups": grpc_frame(b"\x0b" * 100_000), "ten thousand unknown fields": grpc_frame(b"\xf8\x7f\x01" * 10_000),
    "no message": b"", "an overlong varint": grpc_frame(b"\x0a" + b"\xff" * 12),
    "a deep message": grpc_frame(b"\x0a\x02" * 200),
}  # fmt: skip


@pytest.mark.parametrize("body", list(MALFORMED.values()), ids=list(MALFORMED))
def test_malformed_frames(target: Target, body: bytes) -> None:
    answer = ask(target, f"{GENERATION}/Generate", body)
    if answer.reset is None:
        # What is no gRPC frame at all is refused by gRPC itself, some of it as INTERNAL or UNKNOWN; it names nothing of ours.
        check(answer, BLAMELESS | {1, 2, 13})


@pytest.mark.parametrize(
    "replace",
    [{"content-type": "text/plain"}, {":method": "GET"}, {":path": "nonsense"}, {":path": "/a/b/c"}, {":path": "/" + "x" * 20_000}],
    ids=["content type", "method", "path", "long path", "endless path"],
)
def test_what_is_no_grpc_call(target: Target, replace: dict[str, str]) -> None:
    answer = ask(target, f"{GENERATION}/Generate", grpc_frame(b""), replace=replace)
    assert answer.status != 0


def test_a_zip_bomb_costs_no_memory(target: Target) -> None:
    """A quarter of a gibibyte in a quarter of a mebibyte: refused at the limit, not when it is unpacked."""
    bomb = gzip.compress(b"\0" * (256 * MEBIBYTE), 9)
    assert len(bomb) < MEBIBYTE
    frontend = target.frontend()
    before = frontend.memory_info().rss
    peak = before
    for _ in range(3):
        answer = ask(target, f"{GENERATION}/Generate", grpc_frame(bomb, compressed=1), [("grpc-encoding", "gzip")], 60)
        assert answer.status == 8
        peak = max(peak, frontend.memory_info().rss)
    assert peak - before < 64 * MEBIBYTE


def test_messages_over_the_limit_cost_no_memory(target: Target) -> None:
    frontend = target.frontend()
    before = frontend.memory_info().rss
    for _ in range(10):
        answer = ask(target, f"{GENERATION}/Generate", struct.pack(">BI", 0, 512 * MEBIBYTE) + b"x" * 16384, timeout_s=60)
        assert answer.status == 8 or answer.reset is not None
    assert frontend.memory_info().rss - before < 64 * MEBIBYTE


def until_hung_up(connection: socket.socket) -> None:
    """Raises TimeoutError if the server keeps the connection open and silent."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500, b"\0" * 2000,
    ],
    ids=["http1", "tls", "frames", "zeros"],
)  # fmt: skip
def test_other_protocols_on_the_port_are_hung_up_on(target: Target, data: bytes) -> None:
    host, port = target.served.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        until_hung_up(connection)


FRAME = st.tuples(st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60))
"""Type, flags, stream and payload."""


@fuzz
@given(frames=st.lists(FRAME, min_size=1, max_size=8))
def test_any_frames_after_the_preface(target: Target, frames: list[tuple[int, int, int, bytes]]) -> None:
    """type, flags, stream and payload of anybody's choice."""
    host, port = target.served.address.rsplit(":", 1)
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
    for kind, flags, stream, payload in frames:
        data += len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        until_hung_up(connection)


@pytest.mark.parametrize("kind", ["rapid reset", "pings", "settings", "tiny requests", "silent connections"])
def test_floods_leave_others_alone_and_no_memory_behind(target: Target, kind: str) -> None:
    frontend = target.frontend()
    before, files = frontend.memory_info().rss, frontend.num_fds()
    for _ in range(3):
        asyncio.run(flood(target.served.address, kind))
        target.must_be_well(frontend.pid)
    assert frontend.memory_info().rss - before < 64 * MEBIBYTE
    end = time.monotonic() + 60
    while frontend.num_fds() > files + 5:
        assert time.monotonic() < end, "connections stay open"
        time.sleep(0.05)


async def flood(address: str, kind: str) -> None:
    """As much of one thing as a client can do in a moment. The server may hang up in the middle."""
    if kind == "silent connections":
        host, port = address.rsplit(":", 1)
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
        for _, writer in pairs:
            writer.close()
        return
    async with RawClient(address) as raw:
        try:
            await send_flood(raw, kind)
        except (ConnectionError, h2.exceptions.ProtocolError):
            return


async def send_flood(raw: RawClient, kind: str) -> None:
    connection = raw.connection
    headers = [(":method", "POST"), (":scheme", "http"), (":path", f"{GENERATION}/Generate"), (":authority", "x"),
               ("content-type", "application/grpc"), ("te", "trailers")]  # fmt: skip
    if kind == "tiny requests":
        for _ in range(300):
            await raw.call("/grpc.health.v1.Health/Check", grpc_frame(b""))
        return
    for count in range(2000):
        if kind == "pings":
            connection.ping(count.to_bytes(8, "big"))
        elif kind == "settings":
            connection.update_settings({})
        else:
            stream = connection.get_next_available_stream_id()
            connection.send_headers(stream, headers)
            connection.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        if count % 50 == 0:
            await raw.flush()
    await raw.flush()
