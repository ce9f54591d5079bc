"""argparse with one-line errors, and a help that tells every default."""

import argparse
import sys
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


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2, instead of printing the whole usage."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)
