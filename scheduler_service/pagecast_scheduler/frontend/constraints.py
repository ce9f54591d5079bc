"""Constraints of requests: sizes and shapes checked here, then compiled once for a check in a child process that can be killed.

The worker compiles for itself with its own vocabulary; this check is what lets a bad constraint be refused before it is queued, by
name, and without a hostile one (a regular expression that explodes, a grammar without end) holding up any stream.
"""

import json
from typing import Any

from pagecast_scheduler.frontend.chat_rules import forced_call_schema
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.json_schema_rules import check_schema
from pagecast_scheduler.frontend.limits import Limits
from pagecast_wire.sampling import Constraint, ConstraintKind

KINDS = ("json_schema", "json_object", "regex", "choices", "grammar")
"""Kinds by field name, as GetModel lists them."""


def constraint_path(spec: Any) -> str:
    """The field that holds the request's constraint."""
    kind = spec.constraint.WhichOneof("kind")
    return f"spec.constraint.{kind}" if kind else "spec.chat.tools"


def invalid(path: str, text: str) -> Refusal:
    """A refusal of the constraint."""
    return Refusal(Reason.CONSTRAINT_INVALID, violations=(Violation(path, text),))


def constraint_of(spec: Any, limits: Limits) -> Constraint | None:
    """The constraint of a request, its own or that of a forced tool call; None without.

    Raises Refusal for what can be seen without compiling.
    """
    forced = forced_call_schema(spec.chat) if spec.WhichOneof("input") == "chat" else None
    if not spec.HasField("constraint"):
        return None if forced is None else Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(forced))
    if forced is not None:
        raise invalid("spec.constraint", "cannot go with tool_choice REQUIRED, which constrains the output itself")
    kind, path = spec.constraint.WhichOneof("kind"), constraint_path(spec)
    if kind is None:
        raise invalid("spec.constraint.kind", f"must hold one of {', '.join(KINDS)}")
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if kind == "choices":
        return Constraint(ConstraintKind.CHOICES, _choices(list(spec.constraint.choices.texts), path, limits))
    text: str = getattr(spec.constraint, kind)
    _check_size(len(text.encode()), path, limits)
    if not text:
        raise invalid(path, "must not be empty")
    if kind == "json_schema":
        check_schema(text, path, limits.max_constraint_depth)
    return Constraint(ConstraintKind[kind.upper()], text)


def _check_size(size: int, path: str, limits: Limits) -> None:
    if size > limits.max_constraint_bytes:
        raise invalid(path, f"must be at most {limits.max_constraint_bytes} bytes, not {size}")


def _choices(texts: list[str], path: str, limits: Limits) -> str:
    if not 1 <= len(texts) <= limits.max_choices:
        raise invalid(f"{path}.texts", f"must be 1 to {limits.max_choices} texts, not {len(texts)}")
    _check_size(sum(len(text.encode()) for text in texts), f"{path}.texts", limits)
    for at, text in enumerate(texts):
        if not text:
            raise invalid(f"{path}.texts[{at}]", "must not be empty")
    if len(set(texts)) < len(texts):
        at = next(at for at, text in enumerate(texts) if text in texts[:at])
        raise invalid(f"{path}.texts[{at}]", "must be given once")
    return json.dumps(texts, ensure_ascii=False)
