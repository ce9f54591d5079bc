"""Runs the child process that compiles constraints for a check: with a time limit, a bounded queue, and a memory of what passed."""

import asyncio
import json
import os
import sys
from subprocess import DEVNULL, PIPE, Popen

from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.sampling import Constraint

MAX_SECONDS = 4.0
"""A constraint that takes longer is refused; ordinary ones take milliseconds. The child's first start is not counted."""
START_SECONDS = 60.0
MAX_WAITING = 64
MAX_KNOWN = 1024
"""Constraints remembered by hash as good."""


class ConstraintChecker:
    """Owns the child. One check at a time: they are short, and what is not short is killed."""

    def __init__(self) -> None:
        self._child: Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[str] | None = None  # the check under way
        self._num_waiting = 0
        self._good: dict[bytes, None] = {}

    async def check(self, constraint: Constraint | None, path: str) -> Constraint | None:
        """The same constraint. Raises Refusal if it does not compile in time."""
        if constraint is None:
            return None
        key = constraint_digest(constraint)
        if key in self._good:
            return constraint
        if self._num_waiting >= MAX_WAITING:
            raise Refusal(Reason.OVERLOADED, message="too many constraints are being checked")
        self._num_waiting += 1
        try:
            await self._turn.acquire()
            self._work = asyncio.create_task(self._in_turn(constraint, key))
            # A caller that leaves does not take the check with it: the child would have to be started again for the next one, and callers
            # whose deadlines end sooner than that would never be served.
            fault = await asyncio.shield(self._work)
        finally:
            self._num_waiting -= 1
        if fault:
            raise Refusal(Reason.CONSTRAINT_INVALID, violations=(Violation(path, fault),))
        return constraint

    async def _in_turn(self, constraint: Constraint, key: bytes) -> str:
        """What is wrong with a constraint, "" for nothing. Whose turn it is; ends the turn."""
        try:
            fault = "" if key in self._good else await self._ask(constraint)
        finally:
            self._turn.release()
        if not fault:
            self._good[key] = None
            if len(self._good) > MAX_KNOWN:
                del self._good[next(iter(self._good))]
        return fault

    async def _ask(self, constraint: Constraint) -> str:
        child, is_new = self._started()
        line = json.dumps([constraint.kind.name.lower(), constraint.text, constraint.opening, constraint.closing]).encode() + b"\n"
        try:
            if is_new:  # answered when everything is loaded
                await asyncio.wait_for(asyncio.to_thread(_exchange, child, b'["json_object", "", "", ""]\n'), START_SECONDS)
            answer = await asyncio.wait_for(asyncio.to_thread(_exchange, child, line), MAX_SECONDS)
        except asyncio.CancelledError:
            self._kill()  # its answer would be taken for the next one's
            raise
        except (TimeoutError, OSError):
            self._kill()
            return f"takes more than {MAX_SECONDS:g} s to compile"
        if not answer:
            self._kill()
            return "takes more memory to compile than the server allows"
        return str(json.loads(answer))

    def _started(self) -> tuple[Popen[bytes], bool]:
        """The child, and whether it was started just now: from this thread, with whose end it ends."""
        if self._child is not None and self._child.poll() is None:
            return self._child, False
        command = [sys.executable, "-m", "pagecast_scheduler.frontend.constraint_child", str(os.getpid())]
        self._child = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        return self._child, True

    def _kill(self) -> None:
        """Ends the child; the next check starts another."""
        if self._child is not None:
            self._child.kill()
        self._child = None

    async def close(self) -> None:
        """Ends the child and waits for its end."""
        child = self._child
        self._kill()
        if child is not None:
            await asyncio.to_thread(child.communicate)


def _exchange(child: Popen[bytes], line: bytes) -> bytes:
    """One line in, one line out; nothing comes from a child that has ended."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line)
    child.stdin.flush()
    return child.stdout.readline()
