"""`pagecast demo`: a cluster on whatever is there, three questions at the same time through gRPC, three answers growing side by side.

Every figure is measured at the client. Exits with 1 if a question is not answered.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagecast import cluster, models
from pagecast.async_client import AsyncClient
from pagecast.cli.loading import LoadingBar
from pagecast.cli.quantities import COUNT
from pagecast.errors import RpcError
from pagecast.sampling import SamplingParams
from pagecast.types import SequenceFinished, Tokens
from pagecast_scheduler.launch.events import Event, Loading

QUESTIONS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "What is the capital of France, and what is it known for?",
)
_MAX_TOKENS = 120


@dataclass
class Answer:
    """One stream as it grows. Times are seconds of the monotonic clock; first and last token since the question was sent.
    num_first: tokens of the first message, which may bring several."""

    question: str
    sent: float = 0.0
    text: str = ""
    num_tokens: int = 0
    num_first: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    end: str = ""

    def figures(self) -> str:
        """Time to first token, and the rate after it."""
        if not self.num_tokens:
            return self.end or "waiting"
        parts = [f"{self.num_tokens} tokens", f"first after {self.first_token * 1e3:.0f} ms"]
        if self.last_token > self.first_token:
            parts.append(f"{(self.num_tokens - self.num_first) / (self.last_token - self.first_token):.1f} tokens/s")
        return " · ".join([*parts, self.end] if self.end else parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL", help="as for serve (default: %(default)s)")
    parser.add_argument("--max-tokens", type=COUNT, default=_MAX_TOKENS, metavar="N", help="longest answer (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    bar, started = LoadingBar(), time.monotonic()

    def on_event(event: Event) -> None:
        if isinstance(event, Loading):
            bar.update(event.rank, event.phase, event.done, event.total)

    print("starting a front end, a scheduler and a worker ...", flush=True)
    try:
        running = cluster.PrivateCluster(cluster.settings(args.model, max_num_seqs=len(QUESTIONS)), cluster.Watch(on_event))
    finally:
        bar.close()
    with running:
        print(f"serving {models.display_name(args.model)} on {running.addresses[0]} after {time.monotonic() - started:.1f} s\n", flush=True)
        answers = [Answer(question) for question in QUESTIONS]
        asyncio.run(_ask_all(running.addresses[0], answers, args.max_tokens))
    failed = [answer for answer in answers if answer.end.startswith("failed") or not answer.text.strip()]
    total = sum(answer.num_tokens for answer in answers)
    span = max(a.sent + a.last_token for a in answers) - min(a.sent for a in answers)
    if span > 0:
        print(f"\n{total} tokens in {span:.1f} s: {total / span:.1f} tokens/s over three streams; everything is shut down again")
    return 1 if failed else 0


async def _ask_all(target: str, answers: list[Answer], max_tokens: int) -> None:
    async with AsyncClient(target) as client:
        with _display(answers) as refresh:
            await asyncio.gather(*(_ask(client, answer, max_tokens, refresh) for answer in answers))


async def _ask(client: AsyncClient, answer: Answer, max_tokens: int, refresh: Callable[[], None]) -> None:
    answer.sent = time.monotonic()
    chat, sampling = [{"role": "user", "content": answer.question}], SamplingParams(temperature=0, max_tokens=max_tokens)
    try:
        async for event in client.stream(chat, sampling):
            if isinstance(event, Tokens):
                answer.last_token = time.monotonic() - answer.sent
                if not answer.num_tokens:
                    answer.first_token, answer.num_first = answer.last_token, len(event.token_ids)
                answer.num_tokens += len(event.token_ids)
                answer.text += event.text
            elif isinstance(event, SequenceFinished):
                answer.end = event.reason
            refresh()
    except RpcError as error:
        answer.end = f"failed: {error}"
    refresh()


def _display(answers: list[Answer]) -> Any:
    from rich.console import Console

    console = Console()
    return _Columns(answers, console) if console.is_terminal else _Lines(answers)


class _Columns:
    """The answers as columns of a terminal, redrawn ten times a second. Figures stand above the text, and what does not fit the screen
    is left out until the end: rich cannot redraw lines that have scrolled away, and would leave copies of them behind."""

    def __init__(self, answers: list[Answer], console: Any) -> None:
        from rich.live import Live

        self._answers = answers
        self._live = Live(self._table(), console=console, refresh_per_second=10)

    def __enter__(self) -> Callable[[], None]:
        self._live.start()
        return lambda: self._live.update(self._table())

    def __exit__(self, *_: object) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()

    def _table(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(expand=True)
        panels = []
        for a in self._answers:
            table.add_column(ratio=1)
            panels.append(Panel(Group(Text(a.question, style="bold"), Text(a.figures(), style="dim"), Text(), Text(a.text.strip()))))
        table.add_row(*panels)
        return table


class _Lines:
    """Each answer whole, with its figures, once it is complete: for a pipe or a log."""

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        self._printed: set[int] = set()

    def __enter__(self) -> Callable[[], None]:
        return self._refresh

    def __exit__(self, *_: object) -> None:
        self._refresh()

    def _refresh(self) -> None:
        for number, answer in enumerate(self._answers):
            if answer.end and number not in self._printed:
                self._printed.add(number)
                print(f"> {answer.question}\n{answer.text.strip()}\n[{answer.figures()}]\n", flush=True)
