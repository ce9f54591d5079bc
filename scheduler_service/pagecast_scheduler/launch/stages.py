"""The order in which a cluster ends. Pure: told who is alive and what time it is, says whom to signal next."""

import signal
from collections import deque
from collections.abc import Sequence
from typing import Final

from pagecast_scheduler.launch.process import Role, RoleSpec

ORDER: Final[tuple[tuple[Role, ...], ...]] = (("frontend",), ("gateway",), ("scheduler",), ("worker",))
"""Front ends announce their end and drain their streams, for which they need the others; what a gateway says of its health follows theirs,
its calls are among those that they drain, and it then has only answers left to hand on; the scheduler has nothing left to plan."""

_AT_ONCE_GRACE_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0
"""What front ends that are told a second time get to end their calls with a status; they need less than one."""
_DOORS: Final[tuple[Role, ...]] = ("gateway", "frontend")


class Stages:
    """One end of a cluster. deadline: monotonic seconds at which `next` has something to say by time alone, or None."""

    def __init__(self, groups: Sequence[tuple[Role, ...]], restartable: tuple[Role, ...], grace_limit_s: float) -> None:
        self._groups = deque(groups)
        self._current: tuple[Role, ...] = ()
        self._restartable = restartable
        self._grace_limit_s = grace_limit_s
        self._kill = False
        self._hurry: tuple[Role, ...] | None = None  # whom to tell a second time; empty once they are told
        self.deadline: float | None = None

    @classmethod
    def in_order(cls) -> "Stages":
        """One role after the other; while front ends drain, what they need is still started again."""
        return cls(ORDER, ("frontend", "gateway", "scheduler", "worker"), float("inf"))

    @classmethod
    def at_once(cls) -> "Stages":
        """Everyone together, with little patience: nothing is left that draining could save."""
        return cls((tuple(role for group in ORDER for role in group),), (), _AT_ONCE_GRACE_S)

    def kill(self) -> None:
        """SIGKILL to everyone next."""
        self._kill = True
        self._groups.clear()

    def hurry(self) -> None:
        """A second request to end: who answers calls is told once more, and a moment later everyone is killed."""
        if self._hurry is None and not self._kill:
            self._hurry = _DOORS
            self._groups.clear()
        else:
            self.kill()

    def may_restart(self, role: Role) -> bool:
        """Whether a process of this role that dies now is needed again."""
        return role in self._restartable

    def next(self, alive: Sequence[RoleSpec], now: float) -> tuple[signal.Signals, tuple[str, ...]] | None:
        """The signal to send now and to whom, by name; None while nothing is due."""
        if self._hurry:
            told = tuple(spec.name for spec in alive if spec.role in self._hurry)
            self._hurry, self._restartable = (), ()
            self.deadline = now + _LAST_WORDS_S if told else now
            return signal.SIGTERM, told
        if self._hurry == () and (now >= (self.deadline or now) or not any(spec.role in _DOORS for spec in alive)):
            self._hurry, self._kill = None, True
        if self._kill:
            self._kill, self.deadline, self._restartable = False, None, ()
            return signal.SIGKILL, tuple(spec.name for spec in alive)
        members = self._members(alive)
        if members and self.deadline is not None and now >= self.deadline:
            self.deadline = None
            return signal.SIGKILL, tuple(spec.name for spec in members)
        while not members and self._groups:
            if "frontend" in self._current:
                self._restartable = ()
            self._current = self._groups.popleft()
            self._restartable = tuple(role for role in self._restartable if role not in self._current)  # they are to end
            members = self._members(alive)
            if members:
                self.deadline = now + min(self._grace_limit_s, max(spec.grace_s for spec in members))
                return signal.SIGTERM, tuple(spec.name for spec in members)
        return None

    def _members(self, alive: Sequence[RoleSpec]) -> list[RoleSpec]:
        return [spec for spec in alive if spec.role in self._current]
