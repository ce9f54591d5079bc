"""Which JSON Schema keywords can be enforced token by token, and a look through a schema for those that cannot.

Keywords that only describe (title, examples, default ...) are passed over, as JSON Schema has it.
"""

import json
from collections.abc import Iterator
from typing import Any

from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation

UNENFORCEABLE = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependencies",
        "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
        "contentSchema",
    }
)  # fmt: skip
"""Keywords that limit values in ways which no mask over next tokens can hold to; a schema with one is refused, never half obeyed."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")


def _parts(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with their JSON pointers."""
    for key in _MAPS:
        if isinstance(inner := schema.get(key), dict):
            yield from ((f"{pointer}/{key}/{name}", part) for name, part in inner.items())
    for key in _LISTS:
        if isinstance(inner := schema.get(key), list):
            yield from ((f"{pointer}/{key}/{at}", part) for at, part in enumerate(inner))
    for key in _SINGLES:
        if isinstance(inner := schema.get(key), dict):
            yield f"{pointer}/{key}", inner


def _fault(pointer: str, schema: Any) -> str | None:
    where = pointer[:200] or "the top"
    if not isinstance(schema, dict | bool):
        return f"must hold schemas, objects or booleans: not so at {where}"
    if isinstance(schema, dict):
        bad = sorted(UNENFORCEABLE & schema.keys())
        if bad:
            return f'keyword "{bad[0]}" at {where} cannot be enforced'
        target = schema.get("$ref")
        if target is not None and not (isinstance(target, str) and target.startswith("#")):
            return f"$ref at {where} must point into the schema itself, nothing is fetched"
    return None


def check_schema(text: str, path: str, max_depth: int) -> None:
    """Raises Refusal for a text that is no JSON, is nested too deep, or holds what cannot be enforced."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _refusal(path, f"must be nested at most {max_depth} deep") from None
    except ValueError:
        raise _refusal(path, "must be JSON text") from None
    waiting = [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        if (fault := _fault(pointer, part)) is not None:
            raise _refusal(path, fault)
        if isinstance(part, dict):
            waiting += _parts(part, pointer)
    _check_depth(schema, path, max_depth)


def _check_depth(value: Any, path: str, max_depth: int) -> None:
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > max_depth:
            raise _refusal(path, f"must be nested at most {max_depth} deep")
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        waiting += [(item, depth + 1) for item in inner]


def _refusal(path: str, text: str) -> Refusal:
    return Refusal(Reason.CONSTRAINT_INVALID, violations=(Violation(path, text),))
