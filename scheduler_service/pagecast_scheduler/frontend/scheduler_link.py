"""The front end's socket to the scheduler: hellos, pings, and messages each way. Knows slots, but nothing of requests.

A scheduler that does not know us (it was restarted) asks for a new hello. Nothing is sent while no scheduler is connected, so nothing
stale can arrive at a new one.
"""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import structlog
import zmq

from pagecast_wire import WIRE_DIGEST, WIRE_VERSION, WireError, decode, encode
from pagecast_wire.host import pid_namespace
from pagecast_wire.intake import Farewell, FrontendHello, FrontendPing, HelloWanted

log = structlog.get_logger("pagecast.frontend")

TICK_S = 0.25
STOPPED_AFTER_S = 1.0
"""A tick that comes so late shows that this process was stopped; what waited for it meanwhile is not to blame."""
PING_S = 1.0
SILENT_AFTER_S = 5.0
"""The scheduler sends a status at least every second; after so long without any it counts as lost."""
FAREWELL_MS = 500
"""How long the last words may take on their way to a scheduler that is there; one that is not gets none."""
GATHER_S = 0.001
"""What is said so soon after a message left waits for the rest of this time: of a burst of requests, which come in one by one, each would
wake the scheduler by itself, and each of its answers this process."""
MAX_PARTS = 256
"""Messages to the scheduler that leave as one."""
MAX_READS = 64
"""Messages taken from the socket before other work gets its turn."""


class SchedulerLink:
    """A DEALER socket and the slot that its scheduler gave. All methods run on the event loop that `start` was called on.

    receive: takes every message, a HelloWanted apart, which is answered here.
    """

    def __init__(self, address: str, receive: Callable[[Any], None]) -> None:
        self.slot = -1
        self.is_introducing = False  # a hello is on its way: the next welcome answers it
        self._address = address
        self._receive = receive
        self._incarnation = secrets.token_hex(8)
        self._hello_due = True
        self._last_heard = float("-inf")
        self._last_ping = float("-inf")
        self._last_tick = float("inf")
        self._last_flush = float("-inf")
        self._outbox: deque[bytes] = deque()
        self._is_flush_due = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)

    @property
    def has_dialled(self) -> bool:
        """Whether a scheduler takes what is sent."""
        return not self._hello_due

    @property
    def silent_s(self) -> float:
        """Seconds since the scheduler was heard last, without those in which this process stood still."""
        return time.monotonic() - self._last_heard

    @property
    def is_heard(self) -> bool:
        """Whether the scheduler has been heard lately."""
        return self.silent_s < SILENT_AFTER_S

    @property
    def has_room(self) -> bool:
        """Whether the socket takes a message at once."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def start(self) -> None:
        """Dials in; must be called on the event loop. `tick` is to be called from then on, every TICK_S."""
        self._loop = asyncio.get_running_loop()
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.SNDHWM, 100_000), (zmq.RCVHWM, 100_000)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.IDENTITY, f"frontend-{self._incarnation}".encode())
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Leaves the scheduler, and says so."""
        self._loop.remove_reader(self._socket.fileno())
        self.send(Farewell())
        self._flush()
        self._socket.close(FAREWELL_MS)
        self._context.term()

    def send(self, message: msgspec.Struct) -> None:
        """Sends, together with what else is said in this turn of the loop, or soon after another message; keeps it for later while the
        scheduler is slow. While it is gone a resubmission will say it instead."""
        self._outbox.append(encode(message))
        if self._is_flush_due:
            return
        self._is_flush_due = True
        wait = self._last_flush + GATHER_S - time.monotonic()
        if wait > 0:  # no longer: the scheduler takes requests of a list for parts of it while they are close together
            self._loop.call_later(wait, self._flush)
        else:
            self._loop.call_soon(self._flush)

    def join(self, slot: int) -> None:
        """A scheduler has answered the hello. What was meant for the one before it is not sent."""
        self.slot = slot
        self.is_introducing = False
        self._outbox.clear()

    def tick(self, now: float) -> float:
        """A hello or a ping if it is due, and what waits to be sent. Returns the seconds that this process was stopped for, or 0."""
        stopped_s, self._last_tick = now - self._last_tick - TICK_S, now
        if stopped_s <= STOPPED_AFTER_S:
            stopped_s = 0.0
        self._last_heard = min(now, self._last_heard + stopped_s)
        if self._hello_due:
            self._hello()
        self._flush()
        if now - self._last_ping >= PING_S and not self._hello_due:
            self._last_ping = now  # also before the welcome: a scheduler restarted meanwhile then asks for our hello
            try:
                self._socket.send(encode(FrontendPing(slot=self.slot)), zmq.NOBLOCK)
            except zmq.Again:
                pass
        self._read_soon()
        return stopped_s

    def _hello(self) -> None:
        """Introduces this process, if somebody is there to hear it."""
        hello = FrontendHello(WIRE_VERSION, WIRE_DIGEST, self._incarnation, os.getpid(), pid_namespace(), self.slot)
        try:
            self._socket.send(encode(hello), zmq.NOBLOCK)
        except zmq.Again:
            return
        self._hello_due = False
        self.is_introducing = True
        self._read_soon()

    def _flush(self) -> None:
        """Sends what is kept, many messages as the parts of one: each message by itself would wake the scheduler, and ZeroMQ's thread."""
        self._is_flush_due = False
        while self._outbox and not self._socket.closed:
            parts = list(islice(self._outbox, MAX_PARTS))
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_flush = time.monotonic()
            for _ in parts:
                self._outbox.popleft()
            self._read_soon()

    def _read_soon(self) -> None:
        """After a send the socket's descriptor may not signal what has arrived meanwhile; look for it."""
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(MAX_READS):
            if self._socket.closed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                message = decode(self._socket.recv(zmq.NOBLOCK), "to_frontend")
            except WireError as error:
                log.error("message from the scheduler refused", detail=str(error))
                continue
            self._last_heard = time.monotonic()
            if isinstance(message, HelloWanted):
                self._hello_due = True
                self._hello()
            else:
                self._receive(message)
        self._loop.call_soon(self._read)
