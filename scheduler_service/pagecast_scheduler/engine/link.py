"""One bound ROUTER socket: typed messages in and out, every trap of the socket made visible.

A peer that is not there is an answer (`send` says so), not a silent drop. What does not decode is dropped and counted. A hello
of another build is recognised before it is dropped, so that the refusal can name both sides' versions.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from pagecast_wire import codec
from pagecast_wire.keys import SchedulerKeys

MAX_DRAIN = 512
"""Structs taken in one go; the rest wait for the next turn of the loop, so that no peer starves the others."""

UNSENT_LIMIT = 20_000
"""Messages that may wait for one peer before it counts as lost."""

Delivery = Literal["sent", "gone", "full"]


@dataclass(frozen=True)
class ForeignHello:
    """A hello that this build cannot decode; only what tells the builds apart. rank is -1 for a front end."""

    wire_version: int
    wire_digest: str
    rank: int


class Router:
    """Owns the socket bound at `path`. direction: the key of codec.MAX_BYTES for what comes in."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        path: str,
        direction: str,
        head: str | None = None,
        keys: SchedulerKeys | None = None,
    ) -> None:
        """head: "host:port" to listen on as well. keys: peers must hold one that is known, over either. Raises zmq.ZMQError, OSError."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.MAXMSGSIZE, codec.MAX_BYTES[direction])
        self.socket.set(zmq.SNDHWM, UNSENT_LIMIT)
        self.socket.set(zmq.RCVHWM, 0)
        self._guard = _guard(context, self.socket, keys) if keys is not None else None
        previous = os.umask(0o077)
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(previous)
        if head is not None:
            host, _, port = head.rpartition(":")
            self.socket.bind(f"tcp://{socket.gethostbyname(host)}:{port}")
        self._direction = direction
        self.num_dropped = 0
        self.num_received = self.num_sent = 0
        self.bytes_received = self.bytes_sent = 0  # of messages, without ZeroMQ's frames

    def receive(self, most: int = MAX_DRAIN) -> Iterator[tuple[bytes, Any]]:
        """What the waiting messages hold, as (identity, struct or ForeignHello), without waiting. A peer may send several structs as the
        parts of one message; when there were `most`, other messages are left for the next time."""
        while most > 0 and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            most -= max(1, len(parts))
            self.num_received += 1
            self.num_dropped += not parts
            for data in parts:
                self.bytes_received += len(data)
                message = self._decode(data)
                if message is None:
                    self.num_dropped += 1
                else:
                    yield identity, message

    def _decode(self, data: bytes) -> Any:
        try:
            return codec.decode(data, self._direction)
        except codec.WireError:
            return _foreign_hello(data)

    def send(self, identity: bytes, message: msgspec.Struct) -> Delivery:
        """Encode and hand over to the socket, without waiting."""
        return self.send_bytes(identity, codec.encode(message))

    def send_bytes(self, identity: bytes, data: bytes) -> Delivery:
        """Hand over encoded bytes. "gone": no such peer is connected; "full": UNSENT_LIMIT messages wait for it already."""
        try:
            self.socket.send_multipart((identity, data), zmq.NOBLOCK, copy=len(data) < 65536)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return "gone"
            raise
        self.num_sent += 1
        self.bytes_sent += len(data)
        return "sent"

    def close(self) -> None:
        """Close the socket; what is already handed over still leaves within the linger time."""
        self.socket.close()
        if self._guard is not None:
            self._guard.stop()


def _guard(context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: SchedulerKeys) -> ThreadAuthenticator:
    """Make the socket take only peers whose keys are known; ZeroMQ asks the returned thread about each."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", _KnownKeys(keys.ranks))
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    return guard


class _KnownKeys:
    """Whom the guard lets in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = {key.encode() for key in keys}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def _foreign_hello(data: bytes) -> ForeignHello | None:
    """A hello of another build if `data` looks like one. Reads nothing but the three fields that tell builds apart."""
    if len(data) > 65536:
        return None
    try:
        fields = msgspec.msgpack.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, TypeError):
        return None
    if fields.get("type") not in ("worker_hello", "group_join", "frontend_hello"):
        return None
    version, digest, rank = fields.get("wire_version", 0), fields.get("wire_digest", ""), fields.get("rank", -1)
    if not (isinstance(version, int) and isinstance(digest, str) and isinstance(rank, int)):
        return None
    return ForeignHello(version, digest[:64], rank)
