"""argparse with one-line errors, and a help that tells every default."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import NoReturn

from pagecast.cli.quantities import Number, Whole


class _Help(argparse.HelpFormatter):
    """Adds the default where a help does not tell it, and says N of whole numbers and X of others."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_told = "(default" in text or action.default in (None, "", argparse.SUPPRESS) or isinstance(action.default, (bool, list))
        return text if is_told or not action.option_strings else f"{text} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {Whole: "N", Number: "X"}.get(type(action.type)) or super()._get_default_metavar_for_optional(action)


def meant(word: str, known: Iterable[str]) -> str:
    """What to add to an error about a word: the likeliest of those that are known, if one is like it."""
    likeliest = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {likeliest[0]}?" if likeliest else ""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2, instead of printing the whole usage."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)
        self._lines = ""

    def set_lines(self, title: str, lines: Mapping[str, str]) -> None:
        """A list at the end of the help, a line for each name and what it is."""
        width = max(map(len, lines))
        self._lines = "\n".join([f"\n{title}:", *(f"  {name:<{width}}  {text}" for name, text in lines.items()), ""])

    def format_help(self) -> str:
        return super().format_help() + self._lines

    def error(self, message: str) -> NoReturn:
        if (unknown := message.removeprefix("unrecognized arguments: ")) != message:
            message += meant(unknown.partition(" ")[0].partition("=")[0], self._option_string_actions)
        print(f"{self.prog}: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)
