"""Changes of the prefix cache for whoever watches: numbered, kept for a while for those who return, and nothing while nobody does.

A watcher that resumes from a number still known gets what came since; anybody else a snapshot of all that is cached.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from pagecast_scheduler.core.prefix_cache import CLEARED, Change
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.engine.frontends import Frontends
from pagecast_wire.control import CachedBlock, CacheEvents, UnwatchCache, WatchCache

KEPT = 65_536
"""Changes that a returning watcher can still be given."""
PART = 1024
"""Most changes of one message."""


class CacheFeed:
    """Owns the numbering of changes, which begins anew with every scheduler."""

    def __init__(self, frontends: Frontends, instance: str) -> None:
        self._frontends = frontends
        self._instance = instance
        self._sequence = 0  # of the newest change
        self._kept: deque[Change] = deque(maxlen=KEPT)
        self._watchers: set[tuple[int, int]] = set()  # (front end slot, its ticket)

    def take(self, slot: int, message: WatchCache | UnwatchCache, core: Scheduler | None) -> None:
        """A front end begins to watch, or ends it."""
        watcher = (slot, message.ticket)
        if isinstance(message, UnwatchCache):
            self._watchers.discard(watcher)
        elif core is not None:
            self.flush(core)
            core.watch_cache()
            self._watchers.add(watcher)
            self._begin(watcher, message, core)

    def _begin(self, watcher: tuple[int, int], message: WatchCache, core: Scheduler) -> None:
        missed = self._sequence - message.after
        if message.instance == self._instance and 0 <= missed <= len(self._kept):
            first = len(self._kept) - missed
            self._send(watcher, islice(self._kept, first, None), message.after, core.state.epoch)
            return
        blocks = [CachedBlock(*change) for change in core.cached_blocks()]
        parts = [tuple(blocks[at : at + PART]) for at in range(0, len(blocks), PART)] or [()]
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            events = CacheEvents(watcher[1], core.state.epoch, self._sequence, is_snapshot=True, more=more, stored=part)
            self._frontends.send(watcher[0], events)

    def flush(self, core: Scheduler) -> None:
        """Tell watchers what has changed since the last call."""
        changes = core.take_cache_changes()
        if not changes:
            return
        before = self._sequence
        self._sequence += len(changes)
        self._kept.extend(changes)
        for watcher in self._watchers:
            self._send(watcher, changes, before, core.state.epoch)

    def drop(self, slot: int) -> None:
        """A front end has vanished."""
        self._watchers = {watcher for watcher in self._watchers if watcher[0] != slot}

    def _send(self, watcher: tuple[int, int], changes: Iterable[Change], before: int, epoch: int) -> None:
        for events in in_order(changes, watcher[1], before, epoch):
            self._frontends.send(watcher[0], events)


def in_order(changes: Iterable[Change], ticket: int, before: int, epoch: int) -> Iterator[CacheEvents]:
    """Messages that tell the changes in order: within each, what was cleared, then removed, then stored. before: number of the last
    change that is known already."""
    cleared, removed, stored, count = False, list[bytes](), list[CachedBlock](), 0
    for change in changes:
        digest, parent, tokens = change
        turns_back = (bool(stored) and not parent) or (change == CLEARED and count > 0)
        if turns_back or count >= PART:
            before += count
            yield CacheEvents(ticket, epoch, before, cleared=cleared, removed=tuple(removed), stored=tuple(stored))
            cleared, removed, stored, count = False, [], [], 0
        count += 1
        if change == CLEARED:
            cleared = True
        elif parent:
            stored.append(CachedBlock(digest, parent, tokens))
        else:
            removed.append(digest)
    if count:
        yield CacheEvents(ticket, epoch, before + count, cleared=cleared, removed=tuple(removed), stored=tuple(stored))
