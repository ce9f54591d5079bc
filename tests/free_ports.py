"""Ports that stay free until a process of the test binds them."""

import itertools
import os
import socket

_TURN = itertools.count(os.getpid() * 37)
FIRST, COUNT = 20_000, 10_000


def free_port(host: str = "127.0.0.1") -> int:
    """One below those that the kernel gives to outgoing connections, of which other tests make many; each process begins elsewhere."""
    for turn in itertools.islice(_TURN, COUNT):
        port = FIRST + turn % COUNT
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {FIRST} to {FIRST + COUNT}")
