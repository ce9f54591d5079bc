"""The gateway process: configuration in, exit code out. HTTP in front, gRPC to the front ends behind.

End, on SIGTERM or SIGINT: say NOT_SERVING, go on accepting while balancers notice, stop listening, wait for open calls, exit 0. A
second signal ends at once.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagecast.errors import WrongAccess
from pagecast_scheduler.frontend.event_loop import run_until_done
from pagecast_scheduler.frontend.file_limit import take_files
from pagecast_scheduler.gateway.app import TOLD, make_app
from pagecast_scheduler.gateway.backend import Backend
from pagecast_scheduler.gateway.certificate import listening_context
from pagecast_scheduler.gateway.config import GatewayConfig, check
from pagecast_scheduler.gateway.connection import Connection
from pagecast_scheduler.gateway.errors import body
from pagecast_wire import log_lines

log = structlog.get_logger("pagecast.gateway")

MAX_CONNECTIONS = 4096
"""Open connections; more are answered 503. Where the system allows fewer files than these and RESERVED_FILES, as many as it allows."""
RESERVED_FILES = 96
"""File descriptors kept for everything that is no client's connection. Nobody counts those who have not come to the end of their TLS
handshake, who have a minute for it: the system hangs up on what is above both numbers together."""
SLOWEST_UPLOAD = 64 << 10
"""Bytes a second at which the body of a request must come. Who sends a byte now and then does not keep a connection."""


class BodyLimit:
    """ASGI middleware: takes a body whole before anything else sees it. Answers 413 as soon as it passes max_bytes, and 408 when
    nothing more of it comes for silence_s, or when it is not whole after silence_s and what its size takes at SLOWEST_UPLOAD; a body
    whose head does not tell its size has the time of the largest."""

    def __init__(self, app: ASGIApp, max_bytes: int, silence_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        size = int(declared) if declared.isdigit() else self._max_bytes
        if size > self._max_bytes:
            await self._too_large(send)
            return
        taken, more = bytearray(), True
        now = asyncio.get_running_loop().time
        begun, limit_s = now(), self._silence_s + size / SLOWEST_UPLOAD
        while more:
            try:
                async with asyncio.timeout_at(min(now() + self._silence_s, begun + limit_s)):
                    message = await receive()
            except TimeoutError:
                is_slow = now() >= begun + limit_s
                why = f"{len(taken)} bytes of it in {limit_s:.1f} s" if is_slow else f"nothing more of it for {self._silence_s:g} s"
                await _refuse(send, 408, f"the body did not come whole: {why}")
                return
            if message["type"] == "http.disconnect":
                return
            taken += message.get("body", b"")
            more = message.get("more_body", False)
            if len(taken) > self._max_bytes:
                await self._too_large(send)
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(taken), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _too_large(self, send: Send) -> None:
        await _refuse(send, 413, f"the body must be at most {self._max_bytes} bytes")


class LastAnswers:
    """ASGI middleware: once the application is ending, every answer ends its connection, so that clients who keep some turn elsewhere.
    What is open when the time for open calls is over gets 503, unless its answer has begun."""

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]) -> None:
        self._app = app
        self._is_ending = is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def pass_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if self._is_ending():
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, pass_on)
        except asyncio.CancelledError as cut_off:  # by the server, which logs how many it cuts off
            if has_begun:
                cut_off.__dict__[TOLD] = True
                raise
            await _refuse(send, 503, "the server is ending, and the time for open calls is over")


class ServerLog(logging.Handler):
    """What uvicorn has to say becomes a log line like ours, unless it is an error that has one."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not getattr(error, TOLD, False):
            log.log(record.levelno, "HTTP server", said=record.getMessage().strip(), exc_info=error)


async def _refuse(send: Send, status: int, said: str) -> None:
    """An answer in the form of all errors, the last one of its connection."""
    content = body(said, "server_error" if status == 503 else "invalid_request_error")
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def listen(config: GatewayConfig) -> socket.socket:
    """A bound socket, whose connections end when their clients take nothing of what is sent for too long. Raises OSError."""
    host = config.host.strip("[]")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(config.reuse_port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(config.slow_consumer_timeout_s * 1000)))
    made.bind((host, config.port))
    return made


def publish(path: str, address: str) -> None:
    """Writes the address, whole from the moment the file can be seen."""
    fresh = Path(f"{path}.new")
    fresh.write_text(address + "\n")
    os.replace(fresh, path)


class Server(uvicorn.Server):
    """uvicorn with our ways at the end: the first signal is announced and lets open calls finish, the second does not; the exit code is 0.

    announce: called once connections are accepted, and a signal ends what it should. leave: called when a signal does, announce_s
    seconds before nobody is accepted any more."""

    def __init__(self, settings: uvicorn.Config, announce: Callable[[], None], leave: Callable[[], None], announce_s: float) -> None:
        super().__init__(settings)
        self._announce = announce
        self._leave = leave
        self._announce_s = announce_s
        self._is_leaving = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_leaving:
            self.force_exit = self.should_exit = True
            return
        self._is_leaving = True
        self._leave()
        log.info("draining", open_connections=len(self.server_state.connections))
        asyncio.get_running_loop().call_later(self._announce_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def settings_of(config: GatewayConfig, app: ASGIApp, is_ending: Callable[[], bool], connections: int = MAX_CONNECTIONS) -> uvicorn.Config:
    """How uvicorn serves the application. is_ending: answers are their connections' last from then on. connections: most at a time."""
    return uvicorn.Config(
        LastAnswers(BodyLimit(app, config.max_message_bytes, config.http_arrival_s), is_ending),
        http=partial(Connection, config.http_arrival_s),
        log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=config.drain_timeout_s,  # type: ignore[arg-type]  # seconds of asyncio's
        limit_concurrency=connections, server_header=False, ws="none",
    )  # fmt: skip


async def serve(config: GatewayConfig) -> int:
    """Runs one gateway to its end. Returns the exit code."""
    try:
        listener = listen(config)
    except OSError as error:
        print(f"pagecast gateway: cannot listen on {config.host}:{config.port}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        encryption = listening_context(config)
        backend = Backend(config.target.split(","), config.access)
    except WrongAccess as error:
        print(f"pagecast gateway: {error}", file=sys.stderr)
        listener.close()
        return 2
    if config.plaintext_targets:
        log.warning(
            "tokens and prompts go to other machines in plaintext; give --target-tls or --target-ca, unless a mesh encrypts",
            targets=config.plaintext_targets,
        )
    app = make_app(backend, metadata.version("pagecast"))
    connections = max(16, take_files(MAX_CONNECTIONS + RESERVED_FILES) - RESERVED_FILES)
    settings = settings_of(config, app, lambda: app.state.is_ending, connections)
    settings.load()
    settings.ssl = encryption  # of the settings that uvicorn has for files, none follows their changes
    host = f"[{config.host}]" if ":" in config.host and not config.host.startswith("[") else config.host
    address = f"{'https' if config.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"
    listener.listen(MAX_CONNECTIONS)

    def announce() -> None:
        if config.publish is not None:
            publish(config.publish, address)
        log.info("listening", address=address)

    def leave() -> None:
        app.state.is_ending = True

    try:
        await Server(settings, announce, leave, config.drain_announce_s).serve([listener])
    finally:
        await backend.close()
        listener.close()
    log.info("stopped")
    return 0


def run(config: GatewayConfig) -> int:
    """Entry point of the role. Returns the exit code."""
    problem = check(config)
    if problem is not None:
        print(f"pagecast gateway: {problem}", file=sys.stderr)
        return 2
    log_lines.configure(config.log_format, config.log_level, process="gateway")
    server = logging.getLogger("uvicorn.error")
    server.propagate = False
    server.addHandler(ServerLog())
    return run_until_done(serve(config))
