"""Logs of a worker process: one event a line on standard error, as JSON or for people. Never a token, a prompt or an output."""

import logging
import sys
from typing import Any

import structlog

from pagecast_worker.config import LogFormat


def configure(log_format: LogFormat, log_level: str, **fields: Any) -> None:
    """Set structlog up once for this process. "auto": for people on a terminal, else JSON. `fields` stand in every line of every thread."""
    for_people = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())

    def name_process(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **line}

    renderer: Any = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if for_people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            name_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    set_level(log_level)


def set_level(log_level: str) -> None:
    """What is logged from here on, by loggers that exist too."""
    level = logging.getLevelNamesMapping().get(log_level.upper(), logging.INFO)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
