"""When a dead process may start again: with a growing delay, and not for ever. Pure arithmetic over a monotonic clock in seconds."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `budget` restarts of one process within window_s; the delay doubles with each restart in the window."""

    budget: int = 10
    window_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0


class RestartBudget:
    """The restarts of one process."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Seconds to wait before the restart; None when the budget is spent."""
        policy = self._policy
        while self._deaths and now - self._deaths[0] > policy.window_s:
            self._deaths.popleft()
        if len(self._deaths) >= policy.budget:
            return None
        self._deaths.append(now)
        return min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (len(self._deaths) - 1))
