"""Checks a ChatPrompt, and turns it into what a chat template reads."""

import json
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
        if call.arguments and not _is_object(call.arguments):
            found.add(f"{path}.tool_calls[{at}].arguments", "must be JSON text of an object")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


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
        if tool.parameters_json_schema and not _is_object(tool.parameters_json_schema):
            found.add(f"{path}.tools[{at}].parameters_json_schema", "must be JSON text of an object, a JSON Schema")
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
    for name in chat.template_kwargs.fields:
        if not _KWARG.fullmatch(name):
            found.add(path, f"names must be identifiers of at most 64 characters, not {shown(name)}")
        elif name in RESERVED or name.endswith("_token"):
            found.add(f"{path}.{name}", "is a name of the server's own")


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
    size = sum(len(m.content) + sum(len(p.text) for p in m.parts) for m in chat.messages)
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
