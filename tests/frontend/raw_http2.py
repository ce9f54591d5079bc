"""A client that speaks HTTP/2 frame by frame: for what gRPC's own clients never send, or never show."""

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import h2.config
import h2.connection
import h2.events


def grpc_frame(message: bytes, compressed: int = 0) -> bytes:
    """A length-prefixed gRPC message."""
    return struct.pack(">BI", compressed, len(message)) + message


@dataclass
class Answer:
    """What came back on one stream. trailers holds the status, whether it came with the headers or after the messages."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None

    @property
    def status(self) -> int | None:
        """The gRPC status, None if the stream was reset or the answer is not gRPC's."""
        text = self.trailers.get("grpc-status") or self.headers.get("grpc-status")
        return None if text is None else int(text)


class RawClient:
    """One connection. Use as `async with RawClient(address) as raw`."""

    def __init__(self, address: str) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        config = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self.connection = h2.connection.H2Connection(config)
        self._events: deque[h2.events.Event] = deque()
        self._ended: set[int] = set()

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self._host, self._port)
        self.connection.initiate_connection()
        await self.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def flush(self) -> None:
        self.writer.write(self.connection.data_to_send())
        await self.writer.drain()

    async def call(
        self, method: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = (), *, ends: bool = True,
        replace: dict[str, str] | None = None,
    ) -> Answer:
        """Sends one request and waits for its end, or for the connection's."""
        first = {
            ":method": "POST", ":scheme": "http", ":path": method, ":authority": "test",
            "content-type": "application/grpc", "te": "trailers",
        }  # fmt: skip
        stream = self.connection.get_next_available_stream_id()
        self.connection.send_headers(stream, [*(first | (replace or {})).items(), *headers])
        await self._send(stream, body)
        if ends and stream not in self._ended:
            self.connection.end_stream(stream)
        await self.flush()
        return await self.answer(stream)

    async def _send(self, stream: int, body: bytes) -> None:
        """All of it, as the server's window opens, unless the server ends the stream before."""
        while body and stream not in self._ended:
            size = min(len(body), self.connection.local_flow_control_window(stream), self.connection.max_outbound_frame_size)
            if size > 0:
                self.connection.send_data(stream, body[:size])
                body = body[size:]
                continue
            await self.flush()
            async with asyncio.timeout(30):
                if not await self._take():
                    return

    async def _take(self) -> bool:
        """Keeps what the server says for whoever waits for an answer. False at the connection's end."""
        data = await self.reader.read(65536)
        for event in self.connection.receive_data(data) if data else ():
            self._events.append(event)
            if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self._ended.add(event.stream_id)
        return bool(data)

    async def answer(self, stream: int) -> Answer:
        """What comes on a stream, to its end."""
        found = Answer()
        async with asyncio.timeout(30):
            while True:
                while self._events:
                    if self._note(self._events.popleft(), stream, found):
                        await self.flush()
                        return found
                await self.flush()
                if not await self._take():
                    return found

    def _note(self, event: h2.events.Event, stream: int, found: Answer) -> bool:
        """Adds what one event says of a stream; True at the stream's end."""
        if getattr(event, "stream_id", stream) != stream:
            return False
        if isinstance(event, h2.events.ResponseReceived):
            found.headers = _texts(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            found.body += event.data
            if event.flow_controlled_length and stream not in self._ended:
                self.connection.acknowledge_received_data(event.flow_controlled_length, stream)
        elif isinstance(event, h2.events.TrailersReceived):
            found.trailers = _texts(event.headers)
        elif isinstance(event, h2.events.StreamReset):
            found.reset = int(event.error_code)
            return True
        return isinstance(event, h2.events.StreamEnded | h2.events.ConnectionTerminated)


def _texts(headers: Sequence[tuple[bytes | str, bytes | str]]) -> dict[str, str]:
    def text(value: bytes | str) -> str:
        return value.decode() if isinstance(value, bytes) else value

    return {text(key): text(value) for key, value in headers}
