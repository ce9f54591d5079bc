"""What is left of a body without the fields that pydantic refused, so that the others are checked in the same answer."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pagecast_scheduler.gateway import schema

T = TypeVar("T", bound=BaseModel)

_MESSAGE = {"role": "user", "content": "-"}
_STAND_INS: dict[type[BaseModel], dict[str, Any]] = {
    schema.ChatCompletionRequest: {"messages": [_MESSAGE], "logprobs": True, "max_tokens": None},
    schema.CompletionRequest: {"prompt": "-", "max_tokens": None},
    schema.TokenizeRequest: {"prompt": "-", "messages": [_MESSAGE]},
    schema.DetokenizeRequest: {"tokens": []},
}
"""What stands for a refused field where its absence would be a fault of its own, or make one of another field."""

_GO_WITH = {"n": "best_of", "tools": "tool_choice"}
"""Fields that mean nothing without another one."""


def remainder(given: Any, errors: Sequence[Mapping[str, Any]], kind: type[T]) -> T | None:
    """The body `given`, which is taken apart, without what `errors` are about; None where nothing can be made of it."""
    if not isinstance(given, dict):
        return None
    for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):  # these first, while their places are there
        place = error["loc"][1:]
        if error["type"] == "extra_forbidden":
            _take_out(given, place)
        elif place[:1] == ("messages",) and len(place) > 1:
            _mend_message(given["messages"], place[1:])
        elif place[:1] in (("prompt",), ("tokens",)) and isinstance(place[-1], int):
            _mend_prompt(given[place[0]], place[1:])
        elif place:
            given.pop(place[0], None)
            given.pop(_GO_WITH.get(place[0]), None)
            if place[0] in _STAND_INS[kind]:
                given[place[0]] = copy.deepcopy(_STAND_INS[kind][place[0]])
    try:
        return kind.model_validate(given)
    except ValidationError:
        return None


def _take_out(node: Any, place: Sequence[int | str]) -> None:
    """Removes the field at a place; names in it of alternatives that a value could have been are passed over."""
    for step in place[:-1]:
        if (isinstance(node, dict) and step in node) or (isinstance(node, list) and isinstance(step, int)):
            node = node[step]
    if isinstance(node, dict):
        node.pop(place[-1], None)


def _mend_prompt(prompt: list[Any], place: Sequence[int | str]) -> None:
    """Puts something in the place of a prompt, or of a token id of one; the others keep their numbers."""
    steps = [step for step in place if isinstance(step, int)]
    if len(steps) == 2:
        prompt[steps[0]][steps[1]] = 0
    else:
        prompt[steps[0]] = {"Texts": "-", "Lists": [0]}.get(str(place[0]), 0)


def _mend_message(messages: Any, place: Sequence[int | str]) -> None:
    """Takes a field out of one message, which keeps its number: errors name messages by it."""
    if not isinstance(messages, list) or not isinstance(place[0], int):
        return
    message = messages[place[0]]
    if len(place) == 1 or not isinstance(message, dict):
        messages[place[0]] = dict(_MESSAGE)
        return
    message.pop(place[1], None)
    message.setdefault("role", "user")
