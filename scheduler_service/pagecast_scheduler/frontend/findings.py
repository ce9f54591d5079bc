"""Collects what is wrong with a request: every violation with its field path, the limit and the value."""

import math
from collections.abc import Sequence
from typing import Any

from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation

MAX_FIELD_ECHO = 64
"""Longest text value that a violation repeats."""
MAX_NAMED_IDS = 8
"""Token ids that are named, where no more than so many faults were found before; of every list one is."""


MOST_KEPT = 256
"""Violations of one request that are kept; a message can hold a million."""


class Findings(list[Violation]):
    """Violations so far."""

    def add(self, path: str, description: str) -> None:
        if len(self) < MOST_KEPT:  # many more than a status tells of
            self.append(Violation(path, description))

    def number(self, path: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
        """Checks that a number is finite and in [low, high], or (low, high]."""
        if not math.isfinite(value):
            self.add(path, f"must be a finite number, not {value}")
        elif value < low or value > high or (open_low and value == low):
            left = f"greater than {low:g} and at most {high:g}" if open_low else f"{low:g} to {high:g}"
            self.add(path, f"must be {left}, not {value:g}")

    def integer(self, path: str, value: int, low: int, high: int) -> None:
        """Checks that an integer is in [low, high]."""
        if not low <= value <= high:
            self.add(path, f"must be {low} to {high}, not {value}")

    def seconds(self, path: str, message: Any, low: float, high: float, default: float) -> float:
        """Seconds of the Duration field that path ends with; the default where it is absent, or not in [low, high]."""
        field = path.rpartition(".")[2]
        if not message.HasField(field):
            return default
        value = getattr(message, field)
        seconds: float = value.seconds + value.nanos / 1e9
        if low <= seconds <= high:
            return seconds
        self.add(path, f"must be {low:g} s to {high:g} s, not {seconds:g} s")
        return default

    def count(self, path: str, number: int, low: int, high: int, what: str) -> bool:
        """Checks how many there are of something; whether it passes."""
        if low <= number <= high:
            return True
        self.add(path, f"must be at most {high} {what}, not {number}" if number > high else f"must be {low} to {high} {what}, not {number}")
        return False

    def token_ids(self, path: str, ids: Sequence[int], vocab_size: int) -> None:
        """Names the ids outside the vocabulary, and of many the first and how many more there are."""
        if not ids or max(ids) < vocab_size:
            return
        wrong = [at for at, token_id in enumerate(ids) if token_id >= vocab_size]
        named = wrong[: max(1, MAX_NAMED_IDS - len(self))]  # an error that grows too long does not reach its caller
        more = len(wrong) - len(named)
        for at in named:
            rest = f" ({more} more are not below it)" if more and at == named[-1] else ""
            self.add(f"{path}[{at}]", f"must be below the vocabulary size {vocab_size}, not {ids[at]}{rest}")

    def repeated(self, path: str, ids: Sequence[int], suffix: str = "") -> None:
        """Names the first id that came before."""
        seen: set[int] = set()
        for at, token_id in enumerate(ids):
            if token_id in seen:
                self.add(f"{path}[{at}]{suffix}", f"must be given once, {token_id} is repeated")
                return
            seen.add(token_id)

    def refuse(self) -> None:
        """Raises Refusal if anything was found."""
        if self:
            raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(self))


def shown(text: str) -> str:
    """A value as a violation repeats it."""
    return f"{len(text)} characters" if len(text) > MAX_FIELD_ECHO else repr(text)
