"""Numbers, and lists of names, that options take. Every option that is a number has one of these as its argparse type, so that nonsense
is refused by name."""

import argparse
import math
from dataclasses import dataclass

MOST = 2**31 - 1
"""Counts beyond it are slips of the hand."""

LONGEST_S = 366 * 86_400.0
"""Times beyond it, in seconds, are too."""


def _check(value: float, text: str, least: float | None, most: float, unit: str = "") -> None:
    """Raises ArgumentTypeError for a value outside of both bounds, which may be met."""
    if least is not None and value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least:.10g}{unit}, not {text[:40]}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most:.10g}{unit}, not {text[:40]}")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int | None = None
    most: int = MOST

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text[:40]!r}") from None
        _check(value, text, self.least, self.most)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A number up to `most`; where they are given, from `least`, or above `above`. unit: what it counts."""

    least: float | None = None
    above: float | None = None
    most: float = 1e12
    unit: str = ""

    def __call__(self, text: str) -> float:
        unit = f" {self.unit}" if self.unit else ""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a number{' of' + unit if unit else ''}, not {text[:40]!r}")
        if self.above is not None and value <= self.above:
            raise argparse.ArgumentTypeError(f"must be more than {self.above:g}{unit}, not {text[:40]}")
        _check(value, text, self.least, self.most, unit)
        return value


@dataclass(frozen=True, slots=True)
class Names:
    """Some of these names, with commas between."""

    known: tuple[str, ...]

    def __call__(self, text: str) -> set[str]:
        found = set(text.split(","))
        if unknown := sorted(found - set(self.known)):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(self.known)}, with commas between, not {unknown[0]!r}")
        return found


COUNT = Whole(1)
"""Of something that there is to be."""
ANY_COUNT = Whole(0)
"""The same, or none."""
SECONDS = Number(above=0, most=LONGEST_S, unit="seconds")
SHARE = Number(above=0, most=1)
TOKEN_ID = Whole(0, 2**32 - 1)
