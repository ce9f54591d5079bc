"""Checks a ChatPrompt, and turns it into what a chat template reads."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.errors import Violation
from pagecast_scheduler.frontend.findings import Findings, shown
from pagecast_scheduler.frontend.limits import Limits

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names in a template that are ours to give, besides its special tokens (all of which end in _token)."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ROLE = re.compile(r"[!-~]+")
_KWARG = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HALF = re.compile("[\ud800-\udfff]")


def check_chat(chat: Any, path: str, limits: Limits, found: list[Violation]) -> None:
    """Checks messages, tools and template arguments; adds what is wrong to `found`."""
    mine = Findings()
    if mine.count(f"{path}.messages", len(chat.messages), 1, limits.max_chat_messages, "messages"):
        for at, message in enumerate(chat.messages):
            _check_message(message, f"{path}.messages[{at}]", limits, mine)
    _check_tools(chat, path, limits, mine)
    _check_kwargs(chat, f"{path}.template_kwargs", limits, mine)
    found += mine


def _check_message(message: Any, path: str, limits: Limits, found: Findings) -> None:
    if not _ROLE.fullmatch(message.role) or len(message.role) > limits.max_role_length:
        text = f"must be 1 to {limits.max_role_length} printable ASCII characters without spaces, not {shown(message.role)}"
        found.add(f"{path}.role", text)
    if message.content and message.parts:
        found.add(f"{path}.parts", "must be empty where content is given")
    for at, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            found.add(f"{path}.parts[{at}].part", "must hold text")
        elif kind != "text":
            found.add(f"{path}.parts[{at}].{kind}", f"{kind} input is not supported by this model, text only")
    for at, call in enumerate(message.tool_calls):
        if not call.name:
            found.add(f"{path}.tool_calls[{at}].name", "must not be empty")
        if call.arguments:
            _check_object(call.arguments, f"{path}.tool_calls[{at}].arguments", "an object", limits, found)


def _check_object(text: str, path: str, what: str, limits: Limits, found: Findings) -> None:
    """A template writes it into the prompt, and a forced call is made of it: it must be an object, of a depth that can be walked, and of
    characters. JSON's escapes can write halves of surrogate pairs, which are none."""
    too_deep = f"must be nested at most {limits.max_constraint_depth} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        found.add(path, too_deep)
        return
    except ValueError:
        value = None
    if not isinstance(value, dict):
        found.add(path, f"must be JSON text of {what}")
        return
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        if depth > limits.max_constraint_depth:
            found.add(path, too_deep)
            return
        inner = [*part, *part.values()] if isinstance(part, dict) else part
        if any(isinstance(item, str) and _HALF.search(item) for item in inner):
            found.add(path, "must not hold half of a surrogate pair")
            return
        waiting += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]


def _check_tools(chat: Any, path: str, limits: Limits, found: Findings) -> None:
    if not found.count(f"{path}.tools", len(chat.tools), 0, limits.max_tools, "tools"):
        return
    size = sum(len(text.encode()) for tool in chat.tools for text in (tool.name, tool.description, tool.parameters_json_schema))
    if size > limits.max_tools_bytes:
        found.add(f"{path}.tools", f"must be at most {limits.max_tools_bytes} bytes together, not {size}")
        return
    for at, tool in enumerate(chat.tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            found.add(f"{path}.tools[{at}].name", f"must be 1 to 64 letters, digits or _ - . characters, not {shown(tool.name)}")
        if tool.parameters_json_schema:
            place = f"{path}.tools[{at}].parameters_json_schema"
            _check_object(tool.parameters_json_schema, place, "an object, a JSON Schema", limits, found)
    names = [tool.name for tool in chat.tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            found.add(f"{path}.tools[{at}].name", f"must be unique, {shown(name)} is repeated")
    _check_choice(chat, path, names, found)


def _check_choice(chat: Any, path: str, names: list[str], found: Findings) -> None:
    choice = chat.tool_choice
    if choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED:
        if not names:
            found.add(f"{path}.tool_choice.mode", "REQUIRED needs tools")
        elif choice.name and choice.name not in names:
            found.add(f"{path}.tool_choice.name", f"must be the name of one of tools, not {shown(choice.name)}")
    elif choice.name:
        found.add(f"{path}.tool_choice.name", "goes with mode REQUIRED only")


def _check_kwargs(chat: Any, path: str, limits: Limits, found: Findings) -> None:
    if not chat.HasField("template_kwargs"):
        return
    size = chat.template_kwargs.ByteSize()
    if size > limits.max_template_kwargs_bytes:
        found.add(path, f"must be at most {limits.max_template_kwargs_bytes} bytes, not {size}")
        return
    for name, value in chat.template_kwargs.fields.items():
        if not _is_finite(value):
            found.add(f"{path}.{name}" if _KWARG.fullmatch(name) else path, "must hold finite numbers")
        if not _KWARG.fullmatch(name):
            found.add(path, f"names must be identifiers of at most 64 characters, not {shown(name)}")
        elif name in RESERVED or name.endswith("_token"):
            found.add(f"{path}.{name}", "is a name of the server's own")


def _is_finite(value: Any) -> bool:
    """Whether every number in a value of a Struct is one that JSON has."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return all(map(_is_finite, value.struct_value.fields.values()))
    if kind == "list_value":
        return all(map(_is_finite, value.list_value.values))
    return kind != "number_value" or math.isfinite(value.number_value)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A ChatPrompt as a template reads it. size: characters of text in it. tools: None where none are shown."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    size: int


def _whole_numbers(value: Any) -> Any:
    """Struct knows floating-point numbers only; those that are whole become int again."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _message(message: Any) -> dict[str, Any]:
    """One message. Fields that are empty are absent, because templates ask whether they are defined."""
    content = "".join(part.text for part in message.parts) if message.parts else message.content
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments or "{}")}}
            for c in message.tool_calls
        ]
    for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name), ("reasoning_content", message.reasoning_text)):
        if value:
            made[name] = value
    return made


def conversation(chat: Any) -> Conversation:
    """What the template of a checked ChatPrompt gets."""
    is_shown = chat.tools and chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters_json_schema or '{"type": "object", "properties": {}}'),
            },
        }
        for tool in chat.tools
    ]
    size = sum(len(m.content) + len(m.reasoning_text) + sum(len(p.text) for p in m.parts) for m in chat.messages)
    size += sum(len(call.arguments) for m in chat.messages for call in m.tool_calls)
    size += sum(len(t.parameters_json_schema) + len(t.description) for t in chat.tools)
    return Conversation(
        messages=[_message(message) for message in chat.messages],
        tools=tools if is_shown else None,
        kwargs=_whole_numbers(MessageToDict(chat.template_kwargs)),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        size=size,
    )


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself are true at another place (a JSON pointer) of a larger one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, place) for key, item in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#{place}{target[1:]}"
    return moved


def forced_call_schema(chat: Any) -> dict[str, Any] | None:
    """The JSON Schema that a forced tool call must fit; None where no call is forced."""
    if chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_REQUIRED:
        return None
    tools = [tool for tool in chat.tools if not chat.tool_choice.name or tool.name == chat.tool_choice.name]
    choices = []
    for at, tool in enumerate(tools):
        arguments = json.loads(tool.parameters_json_schema or '{"type": "object", "additionalProperties": false}')
        properties = {"name": {"const": tool.name}, "arguments": _moved(arguments, f"/anyOf/{at}/properties/arguments")}
        choices.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    return {"anyOf": choices}
