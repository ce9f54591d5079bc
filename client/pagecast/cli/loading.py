"""The progress bar of a starting cluster: one line for each rank on a terminal, a plain line for each phase elsewhere."""

from collections.abc import Callable
from typing import Any

from pagecast_scheduler.launch.output import write_line


class LoadingBar:
    """Shows progress on standard error until `close`. Safe to call from any one thread at a time; `print` may come from another.

    announce: says where there is no terminal that a rank is in a phase.
    """

    def __init__(self, announce: Callable[[int, str], None] | None = None) -> None:
        from rich.console import Console

        self._announce = announce or (lambda rank, phase: write_line(f"rank {rank}: {phase}"))
        self._console = Console(stderr=True)
        self._bar: Any = None
        self._tasks: dict[int, Any] = {}
        self._phases: dict[int, str] = {}

    def update(self, rank: int, phase: str, done: int, total: int) -> None:
        """A rank is `done` of `total` through a phase of its start."""
        if not self._console.is_terminal:
            if self._phases.get(rank) != phase:
                self._phases[rank] = phase
                self._announce(rank, phase)
            return
        if self._bar is None:
            self._bar = _bar(self._console)
            self._bar.start()
        if rank not in self._tasks:
            self._tasks[rank] = self._bar.add_task(f"rank {rank}", total=None)
        self._bar.update(self._tasks[rank], description=f"rank {rank}: {phase}", completed=done, total=total or None)

    def print(self, name: str, line: str) -> None:
        """A log line of a child, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            write_line(line)

    def close(self) -> None:
        """Leave the terminal as it was. May be called again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
