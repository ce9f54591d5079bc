"""From our statuses to OpenAI's error shape. One table; a body never holds more than the gRPC status said."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pagecast.errors import FieldViolation, RpcError
from pagecast_scheduler.gateway.schema import TOO_MANY

_OF_CODE: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "ALREADY_EXISTS": (409, "conflict_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}
"""gRPC status to HTTP status and OpenAI's error type; any other status is 500, server_error."""

_OF_REASON = {"MESSAGE_TOO_LARGE": (413, "invalid_request_error")}
"""The same for reasons that are told otherwise than their status."""
_TOO_LARGE = "larger than max"
"""In what a transport says of a message that it refuses unread."""

_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "MODEL_UNKNOWN": "model_not_found", "TOKEN_MISSING": "invalid_api_key"}
"""Reasons for which OpenAI has a word of its own; the others appear in lower case."""

_PARAM_OF_REASON = {"MODEL_UNKNOWN": "model", "MODEL_NOT_ALLOWED": "model"}
"""Reasons that are about one field, where the status names none."""

_PARAMS = {
    "spec.sampling.num_sequences": "n",
    "spec.sampling.allowed_token_ids.ids": "allowed_token_ids",
    "spec.sampling.": "",
    "spec.output.logprobs.top_n": "logprobs",
    "spec.output.prompt_logprobs.top_n": "logprobs",
    "spec.output.prompt_logprobs": "logprobs",
    "spec.output.": "",
    "spec.stopping.max_output_tokens": "max_tokens",
    "spec.stopping.min_output_tokens": "min_tokens",
    "spec.stopping.stop_texts": "stop",
    "spec.stopping.time_budget": "time_budget_s",
    "spec.stopping.": "",
    "spec.prompt_text": "prompt",
    "spec.prompt_token_ids.ids": "prompt",
    "spec.prompt_token_ids": "prompt",
    "spec.chat.template_kwargs": "chat_template_kwargs",
    "spec.chat.tool_choice.mode": "tool_choice",
    "spec.chat.tool_choice.name": "tool_choice.function.name",
    "spec.chat.": "",
    "spec.constraint.json_schema": "response_format.json_schema.schema",
    "spec.constraint": "response_format",
    "spec.cache.": "",
    "spec.scheduling.": "",
    "spec.": "",
    "metadata.": "",
    "token_ids": "tokens",
    "text": "prompt",
    "chat.": "",
}
"""Beginning of a field path of the API to what stands for it in an HTTP body; the first that fits is taken."""

_PARTS = tuple((re.compile(pattern), name) for pattern, name in (
    (r"(?<=^tools\[)(\d+)\]\.(name|description)", r"\1].function.\2"),
    (r"(?<=^tools\[)(\d+)\]\.parameters_json_schema", r"\1].function.parameters"),
    (r"(?<=\.tool_calls\[)(\d+)\]\.(name|arguments)", r"\1].function.\2"),
    (r"\.reasoning_text$", ".reasoning_content"),
))  # fmt: skip
"""Inner fields of the API to those of an HTTP body."""

_OWN_FIELD = "spec.request_id"
"""A field that no body has: the gateway fills it."""

HALF_A_PAIR = "must not hold half of a surrogate pair"

_TEXTS = {"extra_forbidden": "unknown field", "string_unicode": HALF_A_PAIR}
"""What pydantic says less well, by its own word for it."""

_COMPILED = ("spec.constraint", "spec.chat.tools")
"""Fields of which a compiler may say anything."""
_PREDICATES = ("must", "matches", "is", "grows", "takes", "does", "with", "needs", "cannot")
"""How what we say ourselves of such a field goes on from its name."""

MOST_FAULTS = 32
"""Faults that one error names; of more it says how many there are."""
_MOST_PATH = 200
"""Characters of a field's path that are told: names of unknown fields are the caller's own."""


Fault = tuple[str, str | None]
"""A sentence, and the field at fault."""


class Faults(list[Fault]):
    """What is wrong with a body so far."""

    def add(self, message: str, param: str | None = None) -> None:
        self.append((message, param))

    def add_refusal(self, error: RpcError, names: Mapping[str, str]) -> None:
        """What a front end says of its fields, but for those that have a fault already, or a part with one."""
        self.extend(self._unknown(_said(error, names)))

    def add_refusals(self, errors: Mapping[int, RpcError], num_prompts: int, names: Mapping[str, str]) -> None:
        """The same for the prompts of one body, by their numbers. What is said of every prompt is told once."""
        said = {number: _said(error, names) for number, error in errors.items()}
        times = Counter(fault for faults in said.values() for fault in faults)
        found = dict.fromkeys(_numbered(fault, number, times[fault] < num_prompts) for number, faults in said.items() for fault in faults)
        self.extend(self._unknown(found))

    def refuse(self, code: str | None = None) -> None:
        """Raises BadBody if anything was found."""
        if self:
            raise BadBody(self, code)

    def _unknown(self, faults: Iterable[Fault]) -> list[Fault]:
        if len(self) >= MOST_FAULTS:
            return []  # none of them would be told
        known = [param for _, param in self if param is not None]
        return [fault for fault in faults if fault[1] is None or not any(_are_one(fault[1], one) for one in known)]


class BadBody(Exception):
    """A body that cannot become a request. str() has every fault; param: the first field at fault; code: OpenAI's word for it, if any."""

    def __init__(self, faults: Faults, code: str | None = None) -> None:
        more = [f"{len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
        super().__init__("; ".join([*(message for message, _ in faults[:MOST_FAULTS]), *more]))
        self.param, self.code = faults[0][1], code


def param_of(path: str, names: Mapping[str, str]) -> str:
    """The HTTP body's name of a field path of the gRPC API. names: of fields that this body calls otherwise."""
    for start, name in _PARAMS.items():
        if path.startswith(start):
            found = name + path.removeprefix(start)
            for part, inner in _PARTS:
                found = part.sub(inner, found)
            return names.get(found, found)
    return path


def _said(error: RpcError, names: Mapping[str, str]) -> list[Fault]:
    """What a front end says of a body's fields. One field of a body can be several of the API's."""
    said = [(_told(v, names), param_of(v.field, names)) for v in error.violations if v.field != _OWN_FIELD]
    told: list[Fault] = list(dict.fromkeys(said))
    if not told and error.reason in _PARAM_OF_REASON:
        told.append((error.message, _PARAM_OF_REASON[error.reason]))
    return told


def _numbered(fault: Fault, number: int, is_its_own: bool) -> Fault:
    """A fault of the prompt with this number in a list. is_its_own: others have not the same one."""
    text, param = fault
    if param is not None and _is_within(param, "prompt"):
        place = f"prompt[{number}]"
        return place + text.removeprefix("prompt"), place + param.removeprefix("prompt")
    return (f"prompt[{number}]: {text}" if is_its_own else text), param


def _told(violation: FieldViolation, names: Mapping[str, str]) -> str:
    """A sentence whose subject is the field, unless the description has one of its own."""
    first = violation.description.partition(" ")[0]
    is_compiled = violation.field.startswith(_COMPILED) and first not in _PREDICATES
    between = ": " if is_compiled or violation.description.startswith(("the ", "prompt of ", "keyword ", "$ref ")) else " "
    return f"{param_of(violation.field, names)}{between}{violation.description}"


def _is_within(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


def _are_one(path: str, other: str) -> bool:
    """Whether one field holds the other. A list of prompts can be too long and hold a bad one besides."""
    return (_is_within(path, other) and (other != "prompt" or path == other)) or _is_within(other, path)


def faults_of(errors: Sequence[Mapping[str, Any]]) -> Faults:
    """What pydantic found. A value that could have been one of several kinds is a fault once, and what it could have held none."""
    found: dict[str, list[str]] = {}
    halves = {_path(error["loc"]) for error in errors if error["type"] == "string_unicode" and len(error["loc"]) > 1}
    with_half = halves.union(*map(_around, halves))
    for error in errors:
        place = _path(error["loc"])
        if error["type"] != "string_unicode" and place in with_half:
            continue  # this alternative is not meant
        if error["type"] == "json_invalid":  # its place is a number of characters, not a field
            found.setdefault("", []).append(f"the body is not JSON: {error['ctx']['error']}")
        elif len(error["loc"]) == 1 and error["type"] == TOO_MANY:
            found.setdefault("", []).append(f"the body {error['msg']}")
        elif len(error["loc"]) == 1 and error["type"] == "string_unicode":
            found.setdefault("", []).append(f"a field's name {HALF_A_PAIR}")
        elif len(error["loc"]) == 1:
            had = "the body is empty: it" if error["type"] == "missing" else "the body"
            found.setdefault("", []).append(f"{had} must be a JSON object, sent as application/json")
        else:
            found.setdefault(place, []).append(_TEXTS.get(error["type"], error["msg"]))
    faults = Faults()
    for path, texts in found.items():
        if found.keys().isdisjoint(_around(path)):
            others = [text.removeprefix("Input should be ") for text in dict.fromkeys(texts) if text != texts[0]]
            text = " or ".join([texts[0], *others])
            faults.add(f"{path[:_MOST_PATH]}: {text}" if path else text, path[:_MOST_PATH] or None)
    return faults


def _around(path: str) -> set[str]:
    """The paths of all that a field is within."""
    return {path[:at] for at, letter in enumerate(path) if at and letter in ".["}


def _path(location: Sequence[int | str]) -> str:
    """("body", "messages", 0, "role") as messages[0].role; names of alternatives that a value could have been are left out."""
    path = ""
    for step in location[1:]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and not step[:1].isupper() and step not in ("str", "function-plain"):
            path += f".{step}" if path else step
    return path


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def of_rpc(error: RpcError, names: Mapping[str, str] = MappingProxyType({})) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """HTTP status, body and headers for a failed call. names: as for `param_of`."""
    reason = "MESSAGE_TOO_LARGE" if not error.reason and _TOO_LARGE in error.message else error.reason
    status, kind = _OF_REASON.get(reason) or _OF_CODE.get(error.code, (500, "server_error"))
    param = param_of(error.violations[0].field, names) if error.violations else _PARAM_OF_REASON.get(error.reason)
    code = _CODES.get(reason, reason.lower()) or None
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    text = "; ".join(dict.fromkeys(_told(v, names) for v in error.violations)) or error.message
    return status, body(text, kind, param, code), headers
