"""The gateway's HTTP connections: uvicorn's, but for a limit on the time that the head of a request may take to come.

uvicorn waits for ever for the first request of a connection, and for the rest of a head that has begun.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """One connection. It is closed when arrival_s are over and no head is whole: since it was made, or since the first byte of a later
    head. Between requests uvicorn's own limit holds."""

    def __init__(self, arrival_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival_s = arrival_s
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._follow()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _follow(self) -> None:
        """Starts the limit where a head is awaited, and ends it where one is whole."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._limit is None:
            self._limit = self.loop.call_later(self._arrival_s, self.timeout_keep_alive_handler)

    def _forget(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
