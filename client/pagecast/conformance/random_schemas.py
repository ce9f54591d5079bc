"""JSON Schemas made up from a seed: small values, every kind that can be enforced, nothing that a validator and a mask could read apart."""

import json
from random import Random
from typing import Any

NAMES = ("name", "size", "kind", "tags", "ok", "größe")
PATTERNS = ("^[a-c]{1,3}$", "^x-[0-9]{2}$", "^(red|green)$")
FORMATS = ("date", "uuid", "ipv4")


def schema_of(seed: int) -> dict[str, Any]:
    """The schema of a seed: an object, or now and then something else."""
    rng = Random(seed)
    made = _object(rng, 2) if rng.random() < 0.7 else _value(rng, 2)
    if rng.random() < 0.2:
        return {"$ref": "#/$defs/it", "$defs": {"it": made}}
    return made


def _value(rng: Random, depth: int) -> dict[str, Any]:
    kinds = [_integer, _number, _string, _words, _literal]
    if depth > 0:
        kinds += [_object, _array, _choice]
    return rng.choice(kinds)(rng, depth)


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object", "properties": {name: _value(rng, depth - 1) for name in names}, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def _array(rng: Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [_value(rng, 0), _value(rng, 0)], "items": False, "minItems": 2}
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _choice(rng: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}


def _integer(rng: Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    made: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    return {**made, "multipleOf": 5, "minimum": 0} if low > 0 and rng.random() < 0.3 else made


def _number(rng: Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-9, 9)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + 3}


def _string(rng: Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 8)}


def _words(rng: Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "b b", 1, None, True, "é", {"x": 1}], 3)}


def _literal(rng: Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"const": "fixed"}, {"type": "boolean"}, {"type": ["string", "null"], "maxLength": 4}])


def text_of(seed: int) -> str:
    """The schema of a seed as JSON text."""
    return json.dumps(schema_of(seed), ensure_ascii=False)
