"""How the model families write tool calls: one table, one small generator each over a `CallReader`."""

import json
from collections.abc import Generator
from dataclasses import dataclass

from pagecast_scheduler.frontend.call_reader import CallReader, Form

Run = Generator[None, None, None]

PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
DEEPSEEK = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}


def hermes(reader: CallReader) -> Run:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them between text."""
    while (yield from reader.text_until("<tool_call>")):
        no_call = yield from reader.json_call()
        if no_call is not None:
            reader.show("<tool_call>" + no_call)
            continue
        yield from reader.until("</tool_call>")


def llama3(reader: CallReader) -> Run:
    """{"name": ..., "parameters": {...}} as the whole answer, with or without a tag before it; several divided by semicolons."""
    is_bare = (yield from reader.peek()) == "{"
    while is_bare or (yield from reader.text_until(PYTHON_TAG)):
        no_call = yield from reader.json_call(only_tools=True)
        if no_call is not None:
            reader.show(no_call)
            is_bare = False
            continue
        is_bare = (yield from reader.peek("; \t\r\n")) == "{"


def mistral(reader: CallReader) -> Run:
    """[TOOL_CALLS] with a JSON array of calls, or with a name and its arguments, once for each call."""
    while (yield from reader.text_until(MISTRAL_CALLS)):
        if (yield from reader.peek()) == "[" and not (yield from reader.starts_with(MISTRAL_ARGS)):
            yield from reader.starts_with("[")
            while (yield from reader.peek(" \t\r\n,")) == "{":
                no_call = yield from reader.json_call()
                reader.show(no_call or "")
            yield from reader.starts_with("]")
            continue
        name = (yield from reader.until(MISTRAL_ARGS, MISTRAL_ID, "{")) or ""
        if reader.mark == "":
            reader.show(MISTRAL_CALLS + name)
            continue
        reader.call(name.strip())
        if reader.mark == MISTRAL_ID:
            yield from reader.until(MISTRAL_ARGS, "{")
        if reader.mark == "{":
            reader.give_back("{")
        yield from reader.value()


def deepseek(reader: CallReader) -> Run:
    """Calls between special tokens: the kind "function", a separator, the name and fenced arguments; or name, separator, arguments."""
    begin, end = DEEPSEEK["call▁begin"], DEEPSEEK["calls▁end"]
    while mark := (yield from reader.text_until(DEEPSEEK["calls▁begin"], begin)):
        if mark != begin:
            yield from reader.until(begin, end)
        while reader.mark == begin or mark == begin:
            mark = None
            head = ((yield from reader.until(DEEPSEEK["sep"])) or "").strip()
            if head == "function":
                head = ((yield from reader.until("\n")) or "").strip()
            reader.call(head)
            yield from reader.until("{", DEEPSEEK["call▁end"])
            if reader.mark == "{":
                reader.give_back("{")
                yield from reader.value()
                yield from reader.until(DEEPSEEK["call▁end"])
            yield from reader.until(begin, end)


def argument(key: str, value: str, is_first: bool) -> str:
    """One argument as a piece of a JSON object: what is JSON already stays, everything else is a string."""
    try:
        json.loads(value)
        text = value.strip()
    except ValueError:
        text = json.dumps(value, ensure_ascii=False)
    return f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: {text}"


def glm4(reader: CallReader) -> Run:
    """<tool_call>name, then <arg_key>k</arg_key><arg_value>v</arg_value> for each argument, </tool_call>."""
    while (yield from reader.text_until("<tool_call>")):
        reader.call(((yield from reader.until("<arg_key>", "</tool_call>")) or "").strip())
        is_first = True
        while reader.mark == "<arg_key>":
            key = ((yield from reader.until("</arg_key>")) or "").strip()
            yield from reader.until("<arg_value>")
            value = (yield from reader.until("</arg_value>")) or ""
            if reader.mark:
                reader.argue(argument(key, value, is_first))
                is_first = False
                yield from reader.until("<arg_key>", "</tool_call>")
        if reader.mark:
            reader.argue("{}" if is_first else "}")


def glm4_lines(reader: CallReader) -> Run:
    """The whole answer is a tool's name on a line of its own, then its arguments as JSON: GLM-4 before 4.5."""
    longest = max(map(len, reader.tools), default=0)
    name = (yield from reader.line(longest)) or ""
    if name.strip() not in reader.tools or (yield from reader.peek()) != "{":
        reader.give_back(name)
    else:
        reader.call(name.strip())
        yield from reader.value()
    yield from reader.text_until()


def qwen3_coder(reader: CallReader) -> Run:
    """<tool_call><function=name><parameter=k>v</parameter>...</function></tool_call>."""
    while (yield from reader.text_until("<tool_call>")):
        yield from reader.until("<function=")
        reader.call(((yield from reader.until(">")) or "").strip())
        is_first = True
        yield from reader.until("<parameter=", "</function>")
        while reader.mark == "<parameter=":
            key = ((yield from reader.until(">")) or "").strip()
            value = (yield from reader.until("</parameter>")) or ""
            if reader.mark:
                reader.argue(argument(key, value.removeprefix("\n").removesuffix("\n"), is_first))
                is_first = False
                yield from reader.until("<parameter=", "</function>")
        if reader.mark:
            reader.argue("{}" if is_first else "}")
        yield from reader.until("</tool_call>")


def bare(reader: CallReader) -> Run:
    """The output is one call and nothing else: what a forced call is constrained to."""
    no_call = yield from reader.json_call()
    reader.show(no_call or "")
    yield from reader.text_until()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One family's form. marks: texts in a chat template that tell it, all of them. shown: special tokens that the form is written with,
    which the parser has to see although they are hidden in output."""

    name: str
    form: Form
    marks: tuple[str, ...]
    shown: tuple[str, ...] = ()


CALL_FORMATS = (
    CallFormat("deepseek", deepseek, (DEEPSEEK["call▁begin"],), tuple(DEEPSEEK.values())),
    CallFormat("glm4", glm4, ("<arg_key>",), ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    CallFormat("qwen3_coder", qwen3_coder, ("<function=", "<parameter="), ("<tool_call>", "</tool_call>")),
    CallFormat("hermes", hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    CallFormat("mistral", mistral, (MISTRAL_CALLS,), (MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID)),
    CallFormat("glm4_lines", glm4_lines, ("[gMASK]", "<|observation|>")),
    CallFormat("llama3_json", llama3, ("<|start_header_id|>", "tools"), (PYTHON_TAG,)),
)
"""The first row whose marks a template holds is its family's."""

FORCED = CallFormat("forced", bare, ())
"""Not of a family: the form of a call that tool_choice demands."""


def call_format_of(template: str) -> CallFormat | None:
    """The form in which the model of a chat template calls tools."""
    return next((row for row in CALL_FORMATS if all(mark in template for mark in row.marks)), None)
