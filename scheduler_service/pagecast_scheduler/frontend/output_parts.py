"""What the text of an answer is made of: text proper, reasoning, tool calls. Splitters that find the marks between them, piece by piece.

A splitter gets text in pieces of any size and gives back parts; a mark that may be beginning is held back until it is one or not.
The parts do not depend on how the text was cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Characters of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Characters of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of the current call's arguments."""

    text: str


Part = Text | Reasoning | CallStart | CallArguments


class MarkFinder:
    """Looks for the first of some marks at the front of a growing text. What it has looked at and found unmarked is given back."""

    def __init__(self) -> None:
        self.pending = ""

    def push(self, text: str) -> None:
        self.pending += text

    def until(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """(text before the first mark, the mark), both taken off; without one, (all that cannot be its beginning, None)."""
        found = [(at, -len(mark), mark) for mark in marks if (at := self.pending.find(mark)) >= 0]
        if found:
            at, _, mark = min(found)
            before, self.pending = self.pending[:at], self.pending[at + len(mark) :]
            return before, mark
        held = max((held_at_end(self.pending, mark) for mark in marks), default=0)
        cut = len(self.pending) - held
        before, self.pending = self.pending[:cut], self.pending[cut:]
        return before, None

    def rest(self) -> str:
        """Everything that is left."""
        text, self.pending = self.pending, ""
        return text


def held_at_end(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` at the end of `text`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family marks its reasoning."""

    name: str
    opening: str
    closing: str


REASONING_FORMATS = (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("think_brackets", "[THINK]", "[/THINK]"))
"""One row for each way that is known, told from the model's chat template."""


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The form whose closing mark a chat template names."""
    return next((row for row in REASONING_FORMATS if row.closing in template), None)


class ReasoningSplitter:
    """Separates reasoning at the beginning of an output from what follows.

    is_open: the prompt ended inside the reasoning, so the output begins there. White space next to the marks is dropped: it belongs
    to neither side. An output that does not begin with the opening mark has no reasoning.
    """

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        self._form = form
        self._finder = MarkFinder()
        self._push = self._inside if is_open else self._before
        self._space = ""
        self._is_bare = True

    def push(self, text: str) -> list[Part]:
        """Parts made certain by these characters."""
        self._finder.push(text)
        return self._push()

    def _before(self) -> list[Part]:
        text = self._finder.pending.lstrip()
        opening = self._form.opening
        if text.startswith(opening):
            self._finder.pending = text[len(opening) :]
            self._push = self._inside
            return self._inside()
        if opening.startswith(text):
            return []
        self._push = self._after
        return self._text(self._finder.rest())

    def _inside(self) -> list[Part]:
        text, mark = self._finder.until([self._form.closing])
        text = self._space + text
        if self._is_bare:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        parts: list[Part] = [Reasoning(shown)] if shown else []
        self._is_bare = self._is_bare and not shown
        if mark is not None:
            self._space, self._is_bare, self._push = "", True, self._after_space
            parts += self._after_space()
        return parts

    def _after_space(self) -> list[Part]:
        text = self._finder.rest().lstrip()
        if text:
            self._push = self._after
        return self._text(text)

    def _after(self) -> list[Part]:
        return self._text(self._finder.rest())

    @staticmethod
    def _text(text: str) -> list[Part]:
        return [Text(text)] if text else []

    def flush(self) -> list[Part]:
        """An opening mark that never came whole is text; reasoning that never closed stays reasoning."""
        rest = self._finder.rest()
        if self._push == self._inside:
            text = self._space + rest
            return [Reasoning(text)] if text and not (self._is_bare and text.isspace()) else []
        return self._text(rest)
