"""The scheduler's loggers: what they say are events, keys and numbers; never a token, never a prompt."""

from typing import Any

import structlog


def logger(part: str) -> Any:
    """The logger of one part of the scheduler process ("engine", "workers", "frontends")."""
    return structlog.get_logger(process="scheduler", part=part)
