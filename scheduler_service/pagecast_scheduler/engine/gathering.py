"""Ranks that compute together meet through the scheduler: who has joined, and the one group that they form.

A group lives as long as all its members. A rank that starts anew can only be met by ranks that start anew, so its arrival ends the
group before it.
"""

from dataclasses import dataclass
from uuid import uuid4

from pagecast_scheduler.engine.processes import Watched
from pagecast_wire.plan import GroupFormed
from pagecast_wire.result import GroupJoin


@dataclass(slots=True)
class Member:
    """One live process that has joined."""

    join: GroupJoin
    identity: bytes
    process: Watched


class Gathering:
    """members: processes that have joined and not yet said hello, by rank. formed: what they were told once all had joined."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.members: dict[int, Member] = {}
        self.formed: GroupFormed | None = None

    @property
    def group(self) -> str:
        """Name of the group that was formed; "" while some rank lacks."""
        return self.formed.group if self.formed else ""

    @property
    def reference(self) -> GroupJoin | None:
        """The member that others must agree with: the one that joined first."""
        return next((member.join for member in self.members.values()), None)

    @property
    def pidfds(self) -> list[int]:
        """What to poll for the end of a process."""
        return [member.process.fd for member in self.members.values() if member.process.fd >= 0]

    def knows(self, join: GroupJoin) -> bool:
        """Whether this very process has joined already."""
        member = self.members.get(join.rank)
        return member is not None and member.join.incarnation == join.incarnation

    def form(self) -> GroupFormed | None:
        """Once every rank has joined: the group's name and the place to meet."""
        if self.formed is None and len(self.members) == self._size:
            self.formed = GroupFormed(uuid4().hex, self.members[0].join.address)
            return self.formed
        return None

    def leave(self, rank: int) -> None:
        """A member has said hello, and is watched elsewhere from now on."""
        member = self.members.pop(rank, None)
        if member is not None:
            member.process.close()

    def member_of(self, fd: int) -> Member | None:
        """Whose process a pidfd watches."""
        return next((member for member in self.members.values() if member.process.fd == fd), None)

    def dissolve(self) -> list[Member]:
        """Forget the group. Returns the members that had not said hello; the caller ends them and closes what watches them."""
        members, self.members, self.formed = list(self.members.values()), {}, None
        return members
