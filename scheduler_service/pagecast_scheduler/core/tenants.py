"""Tokens served per tenant: the counter behind fairness between tenants."""

import numpy as np
from numpy.typing import NDArray


class Tenants:
    """served[i]: tokens computed for tenant i, prompt and output alike. A tenant is active while it has an open request.

    A tenant that becomes active is lifted to the least served active one, or where nobody is active to the most that any tenant had left
    with: being away earns no credit, and what one computed while nobody else wanted to is not held against it by one who comes later.
    """

    def __init__(self, max_idle: int) -> None:
        self.served: NDArray[np.int64] = np.zeros(64, np.int64)
        self._index: dict[str, int] = {}
        self._name: list[str] = []
        self._open: list[int] = []  # open requests per tenant
        self._idle: dict[int, None] = {}  # idle tenants, longest idle first
        self._spare: list[int] = []
        self._active: dict[int, None] = {}
        self._most_left = 0  # tokens served to the most served tenant that ever became idle
        self._max_idle = max_idle

    def enter(self, name: str) -> int:
        """A request of this tenant opens; returns the tenant's index."""
        index = self._index.get(name, -1)
        if index < 0:
            index = self._create(name)
        if not self._open[index]:
            self._idle.pop(index, None)
            least = self.least_served() if self._active else self._most_left
            self.served[index] = max(int(self.served[index]), least)
            self._active[index] = None
        self._open[index] += 1
        return index

    def serve(self, tenants: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """tokens[i] more for tenants[i], which are distinct."""
        if len(tenants) == 1:
            self.served[tenants[0]] += tokens[0]
        else:
            self.served[tenants] += tokens

    def leave(self, index: int) -> None:
        """One of its requests ended."""
        self._open[index] -= 1
        if self._open[index]:
            return
        del self._active[index]
        self._most_left = max(self._most_left, int(self.served[index]))
        self._idle[index] = None
        if len(self._idle) > self._max_idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._index[self._name[oldest]]
            self._spare.append(oldest)

    def least_served(self) -> int:
        """Tokens served to the active tenant that got least; 0 if none is active."""
        return min((int(self.served[index]) for index in self._active), default=0)

    def num_open(self) -> int:
        """Open requests of all tenants, for the auditor."""
        return sum(self._open)

    def _create(self, name: str) -> int:
        if self._spare:
            index = self._spare.pop()
            self._name[index] = name
        else:
            index = len(self._name)
            self._name.append(name)
            self._open.append(0)
        if index >= len(self.served):
            self.served = np.concatenate([self.served, np.zeros(len(self.served), np.int64)])
        self.served[index] = 0
        self._index[name] = index
        return index
