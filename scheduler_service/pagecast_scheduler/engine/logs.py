"""Structured logs of the scheduler process, on standard error: events, keys, numbers; never a token, never a prompt."""

import logging
import sys
from typing import Any

import structlog


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
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def logger(part: str) -> Any:
    """The logger of one part of the scheduler process ("engine", "workers", "frontends")."""
    return structlog.get_logger(process="scheduler", part=part)
