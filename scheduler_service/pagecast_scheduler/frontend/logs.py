"""Log lines of the front end: JSON for machines, console text for people. Prompts and output are never logged."""

import logging
import sys

import structlog


def configure_logs(log_format: str, log_level: str) -> None:
    """Sets structlog up for this process. Tracebacks never show the values of variables. log_format: "json", "console", or "auto" (console on a terminal)."""
    is_console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    last: structlog.typing.Processor = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback) if is_console else structlog.processors.JSONRenderer()
    shared: list[structlog.typing.Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[*shared, last] if is_console else [*shared, structlog.processors.format_exc_info, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
