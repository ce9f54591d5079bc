"""Log lines of front ends and gateways: JSON for machines, console text for people. Prompts and output are never logged."""

import logging
import sys
from typing import Any

import structlog


def configure_logs(log_format: str, log_level: str, **fields: Any) -> None:
    """Sets structlog up for this process. log_format: "json", "console", or "auto" (console on a terminal). `fields` stand in every
    line, of every thread.

    Tracebacks never show the values of variables: those may be prompts.
    """
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)

    def name_process(_logger: Any, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **line}

    processors: list[structlog.typing.Processor] = [name_process, structlog.processors.add_log_level, stamp]
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    set_level(log_level)


def set_level(log_level: str) -> None:
    """What is logged from here on, by loggers that exist too."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]))
