"""Prints one stream as it comes and measures it. Shared by `generate` and `chat`."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from pagecast.errors import Cancelled
from pagecast.sync import Stream
from pagecast.types import Accepted, Event, PromptLogprobs, SequenceFinished, TokenLogprob, Tokens


@dataclass
class Answer:
    """What a stream has brought so far. Times are seconds of the monotonic clock since the call; first_token is 0 before any token.
    num_first: tokens of the first message, which may bring several. text: of the first sequence. waiting: of several
    sequences, what is to be printed of each once it has ended. logprobs: of each sequence's tokens, printed behind it."""

    text: str = ""
    num_tokens: int = 0
    num_first: int = 0
    first_token: float = 0.0
    total: float = 0.0
    reason: str = ""
    num_sequences: int = 1
    waiting: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    is_line_open: bool = True

    def summary(self) -> str:
        """One line for people: how many tokens, how soon the first, how fast the rest."""
        end = f"ended by {self.reason or 'interrupt'}"
        if not self.num_tokens:
            return f"no tokens, {end}"
        later, seconds = self.num_tokens - self.num_first, self.total - self.first_token
        rate = f", {later / seconds:.1f} tokens/s" if later and seconds > 0 else ""
        return f"{self.num_tokens} tokens, first after {self.first_token * 1e3:.0f} ms{rate}, {end}"


def show(stream: Stream, answer: Answer, start: float) -> bool:
    """Print the text of a stream on one line of its own, or each of several sequences' once it has ended, and keep the record in `answer`.
    Returns whether it came to its end: Ctrl-C cancels the request, and the text so far stays."""
    failed = True
    try:
        with _interruptible(stream) as interrupted:
            try:
                for event in stream:
                    _take(event, answer, time.perf_counter() - start)
            except Cancelled:
                if not interrupted.is_set():
                    raise
        failed = False
        return not interrupted.is_set()
    finally:
        for index in sorted(answer.waiting):  # what had not ended
            print(f"[{index}] {answer.waiting.pop(index)}", flush=True)
            answer.is_line_open = False
        if answer.is_line_open and (answer.text or not failed):
            print(flush=True)


def _take(event: Event, answer: Answer, now: float) -> None:
    answer.total = now
    if isinstance(event, Accepted):
        answer.num_sequences = max(1, event.effective.n)
    elif isinstance(event, PromptLogprobs):
        print_logprobs(event.logprobs)
    elif isinstance(event, Tokens):
        if not answer.num_tokens:
            answer.first_token, answer.num_first = now, len(event.token_ids)
        answer.num_tokens += len(event.token_ids)
        answer.logprobs.setdefault(event.sequence_index, []).extend(event.logprobs)
        if event.sequence_index == 0:
            answer.text += event.text
        if answer.num_sequences == 1:
            print(_shown(event), end="", flush=True)
        else:
            answer.waiting[event.sequence_index] = answer.waiting.get(event.sequence_index, "") + _shown(event)
    elif isinstance(event, SequenceFinished):
        answer.reason = event.reason
        index = event.sequence_index
        if index in answer.waiting:
            print(f"[{index}] {answer.waiting.pop(index)}")
            answer.is_line_open = False
        if logprobs := answer.logprobs.get(index):
            if answer.is_line_open:
                print()
            print_logprobs(logprobs)
            answer.is_line_open = False


def print_logprobs(records: Iterable[TokenLogprob]) -> None:
    """A line for each token: its log-probability and text, then the likeliest ones'."""
    for record in records:
        own = "       -" if record.logprob is None else f"{record.logprob:8.4f}"
        top = "".join(f"   {_quoted(other.token_bytes)} {other.logprob:.4f}" for other in record.top)
        print(f"{own}  {_quoted(record.token_bytes)}{top}")


def _quoted(piece: bytes) -> str:
    """A token's text, or its bytes where they are no whole characters."""
    try:
        return json.dumps(piece.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return repr(piece)


def _shown(event: Tokens) -> str:
    """What of an event is printed: reasoning faintly where that can be, each tool call on a line of its own."""
    faint, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    reasoning = f"{faint}{event.reasoning_text}{plain}" if event.reasoning_text else ""
    calls = "".join((f"\n{call.name} " if call.id else "") + call.arguments for call in event.tool_calls)
    return reasoning + event.text + calls


@contextmanager
def _interruptible(stream: Stream) -> Iterator[threading.Event]:
    """While inside, SIGINT cancels `stream` and sets the event. A KeyboardInterrupt instead could strike inside gRPC, between a lock
    and its release; and the cancel itself takes a lock, so it does not run in the handler."""
    interrupted = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        threading.Thread(target=stream.cancel, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
