"""One progress bar over all runs of a bench; plain lines where there is no terminal."""

from typing import IO


class Progress:
    """advance() once a run, with what was measured. Writes to standard output, or to `stream`."""

    def __init__(self, total: int, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._console = Console(file=stream)
        self._bar = Bar(console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def advance(self, text: str) -> None:
        self._bar.update(self._task, advance=1, description=text)
        if not self._console.is_terminal:
            print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        self._bar.stop()
