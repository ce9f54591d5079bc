"""Which constraints the workers have compiled in this epoch, and who waits for those that they have not.

A request with a constraint enters the queue once every rank can follow it, so that no step ever waits for a compiler.
"""

from dataclasses import dataclass, field

from pagecast_scheduler.core.request import Request
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.sampling import Constraint

MAX_PREPARED = 256
"""Digests remembered as compiled, the least recently asked for forgotten first; workers keep more."""


@dataclass(slots=True)
class Constraints:
    """prepared: digests of this epoch. waiting: requests by digest. wanted: constraints that the workers have not been asked for yet."""

    prepared: dict[bytes, None] = field(default_factory=dict)
    waiting: dict[bytes, list[Request]] = field(default_factory=dict)
    wanted: list[Constraint] = field(default_factory=list)

    def expect(self, request: Request) -> None:
        """Marks the request as preparing if its constraint is not compiled."""
        constraint = request.sampling.constraint
        if constraint is None:
            return
        digest = constraint_digest(constraint)
        if digest in self.prepared:
            self._touch(digest)
            return
        request.preparing = True
        if digest not in self.waiting:
            self.waiting[digest] = []
            self.wanted.append(constraint)
        self.waiting[digest].append(request)

    def ready(self, digest: bytes, is_usable: bool) -> list[Request]:
        """The workers have answered. Returns the requests that waited; some of them may have ended since."""
        if is_usable:
            self._touch(digest)
        released = self.waiting.pop(digest, [])
        for request in released:
            request.preparing = False
        return released

    def forget(self) -> None:
        """The workers are gone, and with them what they had compiled."""
        for requests in self.waiting.values():
            for request in requests:
                request.preparing = False
        self.prepared.clear()
        self.waiting.clear()
        self.wanted.clear()

    def take(self) -> list[Constraint]:
        """What the workers are to be asked for now."""
        taken, self.wanted = self.wanted, []
        return taken

    def _touch(self, digest: bytes) -> None:
        self.prepared.pop(digest, None)
        self.prepared[digest] = None
        if len(self.prepared) > MAX_PREPARED:
            del self.prepared[next(iter(self.prepared))]
