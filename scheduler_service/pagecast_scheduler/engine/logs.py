"""Structured logs of the scheduler process, on standard error: events, keys, numbers; never a token, never a prompt."""

import logging
import sys
from typing import Any

import structlog


class _StandardError:
    """Writes a line where standard error is at that moment. A reader that has gone must not take the scheduler with it."""

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = msg


def configure(log_format: str, level: str) -> None:
    """log_format: "json", "console", or "auto" (console on a terminal, JSON otherwise). level: a name of the logging module."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=lambda *_: _StandardError(),
    )
    set_level(level)


def set_level(level: str) -> None:
    """What is logged from here on, by loggers that exist too."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]))


def logger(part: str) -> Any:
    """The logger of one part of the scheduler process ("engine", "workers", "frontends")."""
    return structlog.get_logger(process="scheduler", part=part)
