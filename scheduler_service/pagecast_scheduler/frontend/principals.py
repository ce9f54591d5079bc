"""Who calls: a principal with its tenant, roles and quota. Plain values; how one is recognised is in authorizer.py."""

from dataclasses import dataclass
from enum import Enum

from pagecast_wire.intake import Priority


class Role(Enum):
    """What a principal may do. No role includes another."""

    INFER = "infer"
    OBSERVE = "observe"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one principal in one front end; None is no limit. tokens_per_minute counts prompt and output tokens together."""

    streams: int | None = None
    queued_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    name: what request ids and prefix-cache namespaces belong to. tenant: who shares the engine fairly with others. max_priority: the
    highest class it may ask for. models: names it may use; empty: all that are served.
    """

    name: str
    tenant: str
    roles: frozenset[Role]
    quota: Quota = Quota()
    max_priority: Priority = Priority.INTERACTIVE
    models: frozenset[str] = frozenset()


ANONYMOUS = Principal("", "", frozenset({Role.INFER, Role.OBSERVE}))
"""Everyone, where callers are not authenticated."""

OPERATOR = Principal("operator", "operator", frozenset(Role))
"""Whoever can open a socket in the run directory (mode 0700): the user that runs the cluster."""


def of_certificate(name: str) -> Principal:
    """The principal of a client certificate, where no file of principals says more about it."""
    return Principal(name, name, frozenset({Role.INFER, Role.OBSERVE}))
