"""One supervised process: spawned in a process group of its own, tied to this process's life, watched by a pidfd."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagecast_scheduler.launch.output import OutputPump
from pagecast_wire import lifeline

Role = Literal["gateway", "frontend", "scheduler", "worker"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A process to keep running. argv: its whole command line. index: the number of a front end, the rank of a worker.

    grace_s: seconds between SIGTERM and SIGKILL; for a front end, longer than its drain takes.
    """

    role: Role
    argv: Sequence[str]
    index: int = 0
    grace_s: float = 10.0

    @property
    def name(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role}-{self.index}"


class Lifeline:
    """The pipe whose end tells children that this process is gone (see pagecast_wire.lifeline)."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC)

    def environment(self) -> dict[str, str]:
        """Variables that a child needs to find its end of the pipe."""
        return os.environ | {lifeline.VARIABLE: f"{os.getpid()}:{self.reader}"}

    def close(self) -> None:
        os.close(self.reader)
        os.close(self._writer)


class Child:
    """One life of a process. Must be made by a thread that lives as long as the supervisor: the kernel's parent-death signal
    follows the thread. The own process group keeps a terminal's Ctrl-C away from it: the supervisor alone decides the order."""

    def __init__(self, spec: RoleSpec, life: Lifeline, pump: OutputPump) -> None:
        """Raises OSError if the process cannot be started."""
        self.spec = spec
        self.stream, writer = pump.open(spec.name)
        try:
            self._process = subprocess.Popen(
                list(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=life.environment(),
                pass_fds=(life.reader,),
                process_group=0,
            )
        finally:
            os.close(writer)
        self.pid = self._process.pid
        self.started = time.monotonic()
        self.pidfd = os.pidfd_open(self.pid)

    def signal(self, number: signal.Signals) -> None:
        """Harmless once the process has ended."""
        self._process.send_signal(number)

    def reap(self) -> int:
        """The exit code (negative: the signal that killed it), after the pidfd became readable."""
        code = self._process.wait()
        os.close(self.pidfd)
        return code
