"""Reads the data files: what is asked, and what must come of it.

A file holds {"check": name of the check, "together": how many cases may run at once (1), "cases": [...]}. Values may be written short,
because some requests are huge and others depend on the endpoint's limits:

    {"$repeat": value, "times": n}      a list of n copies
    {"$text": "ab", "times": n}         the text n times
    {"$range": n}                       0 to n - 1
    {"$limit": "name", "plus": 1, "times": 2}   that limit of GetModel.limits, times 2, plus 1; "vocab_size" too
    {"$nested": {"items": 0}, "depth": n}   a mapping nested in its own first key, as JSON text
    {"$json": value}                    JSON text of the value
    {"$end": 0}                         the model's first end token
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pagecast.v1 import model_pb2


@dataclass(frozen=True)
class Case:
    """One case of a data file."""

    group: str
    check: str
    name: str
    data: dict[str, Any]
    together: int = 1


def load(model: model_pb2.Model | None) -> Iterator[Case]:
    """All cases, for an endpoint that serves this model; without one, as they are written."""
    for path in sorted(files("pagecast.conformance").joinpath("cases").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for case in content["cases"]:
                data = case if model is None else expand(case, model)
                yield Case(path.name.removesuffix(".json"), content["check"], case["name"], data, content.get("together", 1))


def expand(value: Any, model: model_pb2.Model) -> Any:
    """The value with everything short written out."""
    if isinstance(value, list):
        return [expand(item, model) for item in value]
    if not isinstance(value, dict):
        return value
    special = next((key for key in value if key.startswith("$") and key in _SHORT), None)
    if special is None:
        return {key: expand(item, model) for key, item in value.items()}
    rest = {key: expand(item, model) for key, item in value.items() if key != special}
    return _SHORT[special](expand(value[special], model), rest, model)


def _limit(name: Any, rest: dict[str, Any], model: model_pb2.Model) -> Any:
    known = model.vocab_size if name == "vocab_size" else getattr(model.limits, name)
    made = known * rest.get("times", 1) + rest.get("plus", 0)
    return int(made) if float(made).is_integer() else made


def _nested(value: Any, rest: dict[str, Any], model: model_pb2.Model) -> str:
    (key,) = value
    key = str(key)
    depth = int(rest["depth"])
    return f'{{"{key}":' * depth + "{}" + "}" * depth


_SHORT: dict[str, Any] = {
    "$repeat": lambda value, rest, model: [value] * rest["times"],
    "$text": lambda value, rest, model: value * rest["times"],
    "$range": lambda value, rest, model: list(range(value)),
    "$limit": _limit,
    "$nested": _nested,
    "$json": lambda value, rest, model: json.dumps(value),
    "$end": lambda value, rest, model: model.end_token_ids[value],
}
