"""One caller's watch of the prefix cache: events between the scheduler's messages and the caller's reads."""

import asyncio
from collections import deque

from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_wire.control import CacheEvents, WatchCache

MAX_UNREAD = 1024
"""Messages that wait for a reader; one more ends its watch, which it can resume from what it has."""


class CacheWatch:
    """Fed by the engine client, read by a handler. It remembers how far it has come, for a scheduler that is replaced."""

    def __init__(self, ticket: int, instance: str, after: int) -> None:
        self.ticket = ticket
        self._instance, self._after = instance, after
        self._unread: deque[tuple[str, CacheEvents]] = deque()
        self._has_overflowed = False
        self._news = asyncio.Event()

    def opening(self) -> WatchCache:
        """The message that begins the watch, or takes it up again."""
        return WatchCache(self.ticket, self._instance, self._after)

    def receive(self, events: CacheEvents, instance: str) -> None:
        """More events have come, of this scheduler. Once one is lost none is taken: a reader resumes behind what it has, without a gap."""
        if self._has_overflowed or len(self._unread) >= MAX_UNREAD:
            self._has_overflowed = True
        else:
            self._unread.append((instance, events))
            self._instance, self._after = instance, -1 if events.more else events.sequence
        self._news.set()

    async def next(self) -> tuple[str, CacheEvents]:
        """(scheduler incarnation, the next events), as soon as there are any. Raises Refusal when they came faster than they were read."""
        while not self._unread:
            if self._has_overflowed:
                raise Refusal(Reason.SLOW_CONSUMER)
            self._news.clear()
            await self._news.wait()
        return self._unread.popleft()
