"""Prints one stream as it comes and measures it. Shared by `generate` and `chat`."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pagecast.types import Event, SequenceFinished, Tokens


@dataclass
class Answer:
    """What a stream has brought so far. Times are seconds of the monotonic clock since the call; first_token is 0 before any token."""

    text: str = ""
    num_tokens: int = 0
    first_token: float = 0.0
    total: float = 0.0
    reason: str = ""

    def summary(self) -> str:
        """One line for people: how many tokens, how soon the first, how fast the rest."""
        after_first = self.total - self.first_token
        rate = f", {(self.num_tokens - 1) / after_first:.1f} tokens/s" if self.num_tokens > 1 and after_first > 0 else ""
        return f"{self.num_tokens} tokens, first after {self.first_token * 1e3:.0f} ms{rate}, ended by {self.reason or 'interrupt'}"


def show(events: Iterable[Event], answer: Answer, start: float) -> None:
    """Print the text of `events` on one line of its own and keep the record in `answer`, also when interrupted."""
    try:
        for event in events:
            answer.total = time.perf_counter() - start
            if isinstance(event, Tokens):
                answer.first_token = answer.first_token or answer.total
                answer.num_tokens += len(event.token_ids)
                answer.text += event.text
                print(event.text, end="", flush=True)
            elif isinstance(event, SequenceFinished):
                answer.reason = event.reason
    finally:
        print(flush=True)
