"""Times at which something about a request changes by itself: deadline, time budget, queue limit."""

import heapq

from pagecast_scheduler.core.request import NEVER, Request


class Timers:
    """A heap of (time, order, request). Entries of finished requests are dropped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._sweep_at = 256

    def add(self, request: Request) -> None:
        """Watch all of the request's limits."""
        if len(self._heap) >= self._sweep_at:  # far limits of requests long gone must not pile up
            self._heap = [entry for entry in self._heap if entry[2].num_open]
            heapq.heapify(self._heap)
            self._sweep_at = max(256, 2 * len(self._heap))
        for time in sorted({request.deadline, request.budget_end, request.queue_end}):
            if time < NEVER:
                heapq.heappush(self._heap, (time, request.order, request))

    def next(self) -> int | None:
        """When the earliest limit of a live request falls due."""
        while self._heap and not self._heap[0][2].num_open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: int) -> list[Request]:
        """Requests with a limit at or before `now`."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
