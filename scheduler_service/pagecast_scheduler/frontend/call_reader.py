"""Finds tool calls in a growing text: the reading head that every family's form is written with.

A form (see `call_forms`) is a generator that asks the head for the next mark, value or call, and is suspended wherever the text ends
for now. At the end of the output it goes on with what is there, so that a call cut short is still a call.
"""

from collections.abc import Callable, Generator
from typing import TypeAlias

from pagecast_scheduler.frontend.call_json import SPACE, CallScanner, ValueScanner
from pagecast_scheduler.frontend.output_parts import CallArguments, CallStart, MarkFinder, Part, Text

Steps: TypeAlias = Generator[None, None, "str | None"]
Form: TypeAlias = "Callable[[CallReader], Generator[None, None, None]]"


class CallReader:
    """A splitter for one output. tools: names of the functions that the request offers."""

    def __init__(self, form: Form, tools: frozenset[str] = frozenset()) -> None:
        self.tools = tools
        self._parts: list[Part] = []
        self.mark = ""
        self._finder = MarkFinder()
        self._ended = False
        self._space = ""
        self._after_call = False
        self._run = form(self)
        next(self._run, None)

    def push(self, text: str) -> list[Part]:
        """Parts that these characters complete."""
        self._finder.push(text)
        next(self._run, None)
        return self._taken()

    def flush(self) -> list[Part]:
        """The end: what was held back is shown as what it was meant to be, or as text."""
        self._ended = True
        next(self._run, None)
        self.show(self._finder.rest())
        if self._space and not self._after_call:
            self._parts.append(Text(self._space))
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def show(self, text: str) -> None:
        """Text of the answer. White space waits for what follows it: beside a call it is dropped."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            self._parts.append(Text(shown))

    def call(self, name: str) -> None:
        """A call begins."""
        self._space, self._after_call = "", True
        self._parts.append(CallStart(name))

    def argue(self, text: str) -> None:
        """The next characters of the call's arguments."""
        if text:
            self._parts.append(CallArguments(text))

    def give_back(self, text: str) -> None:
        """Puts text in front of what is still to be read."""
        self._finder.pending = text + self._finder.pending

    def until(self, *marks: str) -> Steps:
        """All text up to the first of the marks, which is taken too and kept in `mark` ("" at the end of the output)."""
        text = ""
        while True:
            piece, mark = self._finder.until(marks)
            text += piece
            if mark is not None or self._ended:
                self.mark = mark or ""
                return text if mark is not None else text + self._finder.rest()
            yield

    def text_until(self, *marks: str) -> Steps:
        """Shows text until one of the marks, which is given back; None at the end of the output."""
        while True:
            piece, mark = self._finder.until(marks)
            self.show(piece)
            if mark is not None or self._ended:
                return mark
            yield

    def peek(self, ignored: str = SPACE) -> Steps:
        """The next character that is not one of `ignored`, left where it is; those before it are dropped. None at the end."""
        while True:
            self._finder.pending = self._finder.pending.lstrip(ignored)
            if self._finder.pending:
                return self._finder.pending[0]
            if self._ended:
                return None
            yield

    def line(self, most: int) -> Steps:
        """The first line that is not empty, with its end, if it has one within so many characters; None, and nothing taken, otherwise."""
        while True:
            pending = self._finder.pending
            text = pending.lstrip("\r\n")
            end = text.find("\n")
            if 0 <= end <= most:
                self._finder.pending = text[end + 1 :]
                return pending[: len(pending) - len(text) + end + 1]
            if self._ended or end >= 0 or len(text) > most:
                return None
            yield

    def starts_with(self, mark: str) -> Generator[None, None, bool]:
        """Whether the text goes on with `mark`, which is taken then."""
        while True:
            pending = self._finder.pending
            if pending.startswith(mark):
                self._finder.pending = pending[len(mark) :]
                return True
            if self._ended or not mark.startswith(pending):
                return False
            yield

    def value(self) -> Generator[None, None, None]:
        """One JSON value, streamed as the call's arguments."""
        scanner = ValueScanner()
        while not scanner.is_done:
            used = scanner.push(self._finder.pending)
            self.argue(self._finder.pending[:used])
            self._finder.pending = self._finder.pending[used:]
            if not scanner.is_done:
                if self._ended:
                    return
                yield

    def json_call(self, only_tools: bool = False) -> Steps:
        """One object with name and arguments, streamed. Gives back None for a call, else the text taken, which is no call, or was one for
        which it turned out to be no object: what is told of that stays.

        only_tools: it counts as a call only if its first key is of a call and its name is one of `tools`.
        """
        scanner, raw, is_called = CallScanner(), "", False
        while True:
            pending = self._finder.pending
            used = scanner.push(pending)
            self._finder.pending = pending[used:]
            raw += pending[:used]
            refused = only_tools and scanner.first_key not in (None, "name", "function", "type")
            if not (is_called or refused) and scanner.name is not None and (not only_tools or scanner.name in self.tools):
                is_called = True
                self.call(scanner.name)
            if is_called:
                self.argue(scanner.take())
            refused = refused or (only_tools and scanner.name is not None and not is_called)
            if scanner.is_broken or refused or ((scanner.is_done or self._ended) and not is_called):
                return raw
            if scanner.is_done or self._ended:
                if scanner.is_done and not scanner.has_arguments:
                    self.argue("{}")
                return None
            yield
