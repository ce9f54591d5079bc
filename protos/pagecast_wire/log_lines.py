"""Log lines of every process: one event a line on standard error, as JSON or for people. Never a token, a prompt or an output."""

import logging
import os
import sys
from typing import Any

import structlog

COLOURED = "FORCE_COLOR"
"""Variable of the environment by which a process that reads lines for a terminal says so to those that write them into its pipe; a common
one, as is NO_COLOR, which rules everywhere."""


class _StandardError:
    """Writes a line where standard error is at that moment. A reader that has gone must not take the process with it."""

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = msg


def configure(log_format: str, log_level: str, **fields: Any) -> None:
    """Sets structlog up for this process. log_format: "json", "console" (in colour on a terminal), or "auto" (console on a terminal).
    log_level: a name of the logging module. `fields` stand in every line, of every thread.

    Tracebacks never show the values of variables: those may be prompts.
    """

    def name_process(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **line}

    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    processors: list[structlog.typing.Processor] = [name_process, structlog.processors.add_log_level, stamp]
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        processors.append(structlog.dev.ConsoleRenderer(colors=_coloured(), exception_formatter=structlog.dev.plain_traceback))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(processors=processors, logger_factory=lambda *_: _StandardError())
    set_level(log_level)


def _coloured() -> bool:
    """Whether lines for people may hold the codes of a terminal: where they end up on one."""
    return not os.environ.get("NO_COLOR") and (sys.stderr.isatty() or bool(os.environ.get(COLOURED)))


def set_level(log_level: str) -> None:
    """What is logged from here on, by loggers that exist too."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]))
