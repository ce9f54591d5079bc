"""The event loop of a process that serves: uvloop where it is installed, which moves a fifth more messages, else asyncio's own."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_until_done(work: Coroutine[Any, Any, int]) -> int:
    """Runs `work` on a loop of its own and returns its exit code."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
