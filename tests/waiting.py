"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 120.0


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Fails, and says what did not come about, after limit_s."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)
