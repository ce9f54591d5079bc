"""The rules of recovery without sockets or processes: when a step is overdue, when an epoch may open again, when to give up.

Times are integer microseconds of one monotonic clock, handed in by the caller.
"""

from collections import deque
from dataclasses import dataclass

SECOND = 1_000_000

DEADLINE_FACTOR = 10
"""A step may take so many times its predicted duration, on top of the floor."""


@dataclass(frozen=True)
class _InFlight:
    step: int
    num_tokens: int
    sent: int


class StepClock:
    """Learns how long steps take and says when the oldest one in flight is overdue.

    Durations are remembered per size class (tokens of the step, by power of two) as a moving average; a class not seen yet is
    predicted from the largest smaller one in proportion. Steps execute in order, so the oldest began when it was sent or when
    its predecessor's result came, whichever was later.
    """

    def __init__(self, floor: int) -> None:
        """floor: least time that any step is granted, in microseconds."""
        self._floor = floor
        self._durations: dict[int, float] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._last_result = 0

    def sent(self, step: int, num_tokens: int, now: int) -> None:
        """A plan left for the workers."""
        self._in_flight.append(_InFlight(step, max(num_tokens, 1), now))

    def done(self, step: int, now: int) -> None:
        """The result of the oldest plan in flight came; anything else is ignored."""
        if not self._in_flight or self._in_flight[0].step != step:
            return
        oldest = self._in_flight.popleft()
        duration = now - max(oldest.sent, self._last_result)
        size = oldest.num_tokens.bit_length()
        known = self._durations.get(size)
        self._durations[size] = duration if known is None else known + (duration - known) / 8
        self._last_result = now

    def reset(self, now: int) -> None:
        """Nothing is in flight any more (a new epoch). What was learned stays."""
        self._in_flight.clear()
        self._last_result = now

    def forgive(self, pause: int) -> None:
        """The scheduler itself was stopped for so long: nobody else is to blame for it."""
        self._in_flight = deque(_InFlight(p.step, p.num_tokens, p.sent + pause) for p in self._in_flight)
        self._last_result += pause

    def predict(self, num_tokens: int) -> float:
        """Predicted duration of a step of that many tokens, in microseconds; 0 while nothing is known."""
        size = max(num_tokens, 1).bit_length()
        if not self._durations:
            return 0.0
        below = [s for s in self._durations if s <= size]
        nearest = max(below) if below else min(self._durations)
        return self._durations[nearest] * 2.0 ** max(size - nearest, 0)

    @property
    def num_in_flight(self) -> int:
        """Plans sent whose result has not come."""
        return len(self._in_flight)

    @property
    def next_step(self) -> int:
        """Step whose result is due next; 0 if none is in flight."""
        return self._in_flight[0].step if self._in_flight else 0

    def deadline(self) -> int | None:
        """Time at which the oldest plan in flight is overdue; None if there is none."""
        if not self._in_flight:
            return None
        return self._began() + self._allowance()

    def is_stalled(self, now: int) -> bool:
        """Half of the oldest plan's allowance is used up: no longer healthy, not yet given up."""
        return bool(self._in_flight) and now > self._began() + self._allowance() // 2

    def _began(self) -> int:
        return max(self._in_flight[0].sent, self._last_result)

    def _allowance(self) -> int:
        return self._floor + int(DEADLINE_FACTOR * self.predict(self._in_flight[0].num_tokens))


class CrashLoopBrake:
    """Slows down, then stops, the reopening of epochs when worker groups keep dying.

    The first `free` failures within `window` cost nothing; each further one doubles the delay up to `longest`; at `limit`
    failures within the window it is over.
    """

    def __init__(self, free: int = 4, limit: int = 20, window: int = 600 * SECOND, longest: int = 30 * SECOND) -> None:
        self._free = free
        self._limit = limit
        self._window = window
        self._longest = longest
        self._failures: deque[int] = deque()

    def failed(self, now: int) -> int:
        """Count a failure; the time before which no epoch may open."""
        self._failures.append(now)
        self._forget(now)
        excess = len(self._failures) - self._free
        if excess <= 0:
            return now
        return now + min(SECOND // 2 << min(excess - 1, 16), self._longest)

    def is_braking(self, now: int) -> bool:
        """More failures than are free lately: new work is better sent elsewhere."""
        self._forget(now)
        return len(self._failures) > self._free

    def is_hopeless(self, now: int) -> bool:
        """The limit is reached: better to end with an error than to go on."""
        self._forget(now)
        return len(self._failures) >= self._limit

    def _forget(self, now: int) -> None:
        while self._failures and self._failures[0] < now - self._window:
            self._failures.popleft()
