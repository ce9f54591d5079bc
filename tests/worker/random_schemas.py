"""Random JSON schemas of the keywords that structured output supports, and other constraints with what accepts them."""

import json
from random import Random
from typing import Any

DEPTH = 3


def random_schema(random: Random, depth: int = DEPTH) -> dict[str, Any]:
    """One schema; the deeper, the fewer kinds."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "anyOf"]
    return _KINDS[random.choice(kinds)](random, depth)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(["name", "age", "a b", "x-y", "größe", "tags", "id", "quote\"d"], random.randint(0, 4))
    schema = {
        "type": "object", "properties": {name: random_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6], "additionalProperties": False,
    }  # fmt: skip
    if depth == DEPTH and random.random() < 0.5:
        schema["$defs"] = {"inner": random_schema(random, 0)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/inner"}
    return schema


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    return {"type": "array", "items": random_schema(random, depth - 1), "minItems": least, "maxItems": least + random.randint(0, 3)}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 1000)}


def _string(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 8)}


_KINDS = {
    "string": _string,
    "integer": _integer,
    "object": _object,
    "array": _array,
    "number": lambda random, depth: {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
    "boolean": lambda random, depth: {"type": "boolean"},
    "null": lambda random, depth: {"type": "null"},
    "enum": lambda random, depth: {"enum": random.sample(["red", "green", 7, None, True, "日本", {"k": 1}], random.randint(1, 4))},
    "const": lambda random, depth: {"const": random.choice(["fixed", 3.5, [1, 2], False])},
    "pattern": lambda random, depth: {"type": "string", "pattern": random.choice(["^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(yes|no)$"])},
    "anyOf": lambda random, depth: {"anyOf": [random_schema(random, depth - 1) for _ in range(random.randint(1, 3))]},
}


def schema_text(seed: int) -> str:
    return json.dumps(random_schema(Random(seed)))
