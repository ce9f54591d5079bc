"""One progress bar over all runs of a bench; plain lines where there is no terminal."""


class Progress:
    """advance() once a run, with what was measured."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        self._console = Console()
        self._bar = Bar(console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def advance(self, text: str) -> None:
        self._bar.update(self._task, advance=1, description=text)
        if not self._console.is_terminal:
            print(text, flush=True)

    def close(self) -> None:
        self._bar.stop()
