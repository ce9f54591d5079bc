"""What clients of the HTTP gateway do not send, and calls that are open at its end: connections that nobody needs are not kept."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from e2e.cli_server import LIMIT_S
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from pagecast_scheduler.gateway import main
from pagecast_scheduler.gateway.config import GatewayConfig

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: 2\r\n\r\n{}"
OK = b"HTTP/1.1 200 OK\r\n"


class Held:
    """An application that answers once it is let, with the first half at once where it is told to."""

    def __init__(self, *, begins: bool = False) -> None:
        self.asked, self.let = asyncio.Semaphore(0), asyncio.Event()
        self._begins = begins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        if self._begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
        self.asked.release()
        await self.let.wait()
        if not self._begins:
            await send(start)
        await send({"type": "http.response.body", "body": b"k" if self._begins else b"ok"})


@dataclass
class Served:
    """A server in this process. end: what its signal does."""

    port: int
    end: Callable[[], None]
    task: asyncio.Task[None]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    """Kept, because one that is forgotten closes its connection."""

    async def send(self, content: bytes) -> asyncio.StreamReader:
        """What a new connection answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(content)
        self.writers.append(writer)
        return reader


@asynccontextmanager
async def served(app: Held, **limits: float) -> AsyncIterator[Served]:
    config = GatewayConfig("127.0.0.1:1", http_port=0, **limits)  # type: ignore[arg-type]  # each of them is a number
    settings = main.settings_of(config, app, lambda: False)
    settings.load()
    listening = asyncio.Event()
    listener = main.listen(config)
    listener.listen()
    server = main.Server(settings, listening.set, lambda: None, 0)
    task = asyncio.create_task(server.serve([listener]))
    made = Served(listener.getsockname()[1], lambda: server.handle_exit(15, None), task)
    try:
        await listening.wait()
        yield made
    finally:
        for writer in made.writers:
            writer.close()
        server.force_exit = server.should_exit = True
        await task
        listener.close()


async def test_who_does_not_send_on_does_not_keep_a_connection() -> None:
    async with asyncio.timeout(LIMIT_S), served(app := Held(), http_arrival_s=0.2) as server:
        patient = await server.send(WHOLE)
        await app.asked.acquire()
        silent, half_head, half_body, half_chunk = [await server.send(content) for content in (
            b"", HEAD, HEAD + b'Content-Length: 20\r\n\r\n{"model":', HEAD + b'Transfer-Encoding: chunked\r\n\r\n9\r\n{"mod',
        )]  # fmt: skip
        assert await silent.read() == b"" and await half_head.read() == b""
        for reader in (half_body, half_chunk):
            head, _, content = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ") and b"the body did not come whole" in content
        app.let.set()  # whose request is there waits for its answer as long as it takes
        assert (await patient.readuntil(b"ok")).startswith(OK)


async def test_the_second_request_of_a_connection_must_come_whole_too() -> None:
    async with asyncio.timeout(LIMIT_S), served(app := Held(), http_arrival_s=0.2) as server:
        app.let.set()
        reader = await server.send(WHOLE)
        await reader.readuntil(b"ok")
        [writer] = server.writers
        writer.write(WHOLE)
        assert (await reader.readuntil(b"ok")).startswith(OK)
        writer.write(HEAD)
        assert await reader.read() == b""


@pytest.mark.parametrize("begins", [False, True])
async def test_calls_that_are_cut_off_at_the_end_are_told_in_one_line(begins: bool) -> None:
    server_log, handler = logging.getLogger("uvicorn.error"), main.ServerLog()
    server_log.addHandler(handler)
    try:
        with capture_logs() as lines:
            async with asyncio.timeout(LIMIT_S), served(app := Held(begins=begins), drain_timeout_s=0.1) as server:
                open_call = await server.send(WHOLE)
                await app.asked.acquire()
                server.end()
                answer = await open_call.read()
                await server.task
    finally:
        server_log.removeHandler(handler)
    if begins:
        assert answer.startswith(OK) and answer.endswith(b"\r\n\r\no")
    else:
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and "is ending" in content.decode()
    assert ["Cancel 1 running task" in line["said"] for line in lines if line["log_level"] == "error"] == [True]  # without a traceback
