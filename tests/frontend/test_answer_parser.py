"""Tool calls and reasoning out of text: every family's form, whatever the pieces; what is no call stays text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecast_scheduler.frontend.answer_parser import AnswerParser, AnswerPlan, call_id
from pagecast_scheduler.frontend.call_forms import CALL_FORMATS, DEEPSEEK, FORCED, CallFormat, call_format_of
from pagecast_scheduler.frontend.call_json import CallScanner
from pagecast_scheduler.frontend.output_parts import REASONING_FORMATS, reasoning_format_of

FORMS = {form.name: form for form in (*CALL_FORMATS, FORCED)}
TOOLS = frozenset({"get_weather", "add"})
THINK = REASONING_FORMATS[0]
ARGUMENTS = {"city": "Köln \"x\" }{", "days": [1, 2]}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)


def read(plan: AnswerPlan, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, calls as (name, arguments)), checking that ids come with names and indices count."""
    parser = AnswerParser(plan, "r1", 2)
    got = [parser.push(piece) for piece in pieces] + [parser.flush()]
    calls: list[list[str]] = []
    for parsed in got:
        for piece in parsed.calls:
            if piece.id:
                assert piece.index == len(calls) and piece.id == call_id("r1", 2, piece.index)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return "".join(p.text for p in got), "".join(p.reasoning for p in got), [(name, text) for name, text in calls]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(name: str, arguments: str) -> str:
    return f"{DEEPSEEK['call▁begin']}function{DEEPSEEK['sep']}{name}\n```json\n{arguments}\n```{DEEPSEEK['call▁end']}"


D = DEEPSEEK
BOTH = [("get_weather", JSON), ("add", '{"a": 1}')]
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"Let me see.\n{hermes(*BOTH[0])}\n{hermes(*BOTH[1])}", "Let me see.", BOTH),
    ("hermes", f"{hermes(*BOTH[1])}\nDone.", "Done.", BOTH[1:]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", "no calls < here <tool", "no calls < here <tool", []),
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>\n{"name": "add", "argume{"a": 1}', '<tool_call>\n{"name": "add", "argume{"a": 1}', [("add", "")]),
    ("llama3_json", '{"parameters": {"a": 1}, "name": "add"}', '{"parameters": {"a": 1}, "name": "add"}', []),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "add", "parameters": {{"a": 1}}}}', "", BOTH),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', "", BOTH[1:]),
    ("llama3_json", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("llama3_json", '{"name": "Rome", "size": 3}', '{"name": "Rome", "size": 3}', []),
    ("llama3_json", "Hello {there}", "Hello {there}", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "add", "arguments": {{"a": 1}}}}]', "", BOTH),
    ("mistral", f"Hm. [TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]add[CALL_ID]x9[ARGS]{{\"a\": 1}}", "Hm.", BOTH),
    ("mistral", f"[TOOL_CALLS]get_weather{JSON}[TOOL_CALLS]add{{\"a\": 1}}", "", BOTH),
    ("mistral", "plain [text]", "plain [text]", []),
    ("deepseek", f"Hm.{D['calls▁begin']}{deepseek(*BOTH[0])}\n{deepseek(*BOTH[1])}{D['calls▁end']}", "Hm.", BOTH),
    ("deepseek", f"{D['calls▁begin']}{D['call▁begin']}add{D['sep']}{{\"a\": 1}}{D['call▁end']}{D['calls▁end']}", "", BOTH[1:]),
    (
        "glm4",
        "Ok.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        "Ok.",
        [("get_weather", '{"city": "Köln", "days": [1, 2]}'), ("now", "{}")],
    ),
    ("glm4_lines", f"\nget_weather\n{JSON}", "", BOTH[:1]),
    ("glm4_lines", "get_weather\nis what I would ask", "get_weather\nis what I would ask", []),
    ("glm4_lines", "Hello.\n{}", "Hello.\n{}", []),
    ("glm4_lines", "Hi", "Hi", []),
    ("glm4_lines", "a line that is much longer than any name of a tool", "a line that is much longer than any name of a tool", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\nam Rhein\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("get_weather", '{"city": "Köln\\nam Rhein", "days": 3}')],
    ),
    ("forced", f' {{"name": "get_weather", "arguments": {JSON}}}', "", BOTH[:1]),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 7), max_size=60))
def test_parts_do_not_depend_on_the_cuts(case: tuple[str, str, str, list[tuple[str, str]]], sizes: list[int]) -> None:
    form, text, shown, calls = case
    plan = AnswerPlan(FORMS[form], tools=TOOLS)
    assert read(plan, cut(text, sizes)) == (shown, "", calls)


@pytest.mark.parametrize(("form", "text", "shown", "calls"), CASES)
def test_every_form_in_one_piece_and_character_by_character(form: str, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    plan = AnswerPlan(FORMS[form], tools=TOOLS)
    assert read(plan, [text]) == read(plan, list(text)) == (shown, "", calls)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "forced"])
def test_arguments_arrive_while_they_are_written(name: str) -> None:
    text = {"hermes": hermes("add", JSON), "mistral": f"[TOOL_CALLS]add{JSON}"}.get(name, f'{{"name": "add", "arguments": {JSON}}}')
    parser = AnswerParser(AnswerPlan(FORMS[name], tools=TOOLS), "r", 0)
    pieces = [piece for char in text for piece in parser.push(char).calls]
    assert len(pieces) > len(JSON) // 2 and "".join(p.arguments for p in pieces) == JSON


REASONED = [
    ("<think>\nI wonder.\n</think>\n\nYes.", False, "Yes.", "I wonder."),
    ("I wonder </thin k>\n</think>Yes ", True, "Yes ", "I wonder </thin k>"),
    ("No thought at all <think>", False, "No thought at all <think>", ""),
    ("<think>never closed ", False, "", "never closed "),
    ("<thi", False, "<thi", ""),
    ("<think></think> A", False, "A", ""),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REASONED), st.lists(st.integers(0, 5), max_size=40))
def test_reasoning_is_separated(case: tuple[str, bool, str, str], sizes: list[int]) -> None:
    text, is_open, shown, reasoning = case
    assert read(AnswerPlan(reasoning=THINK, reasoning_is_open=is_open), cut(text, sizes)) == (shown, reasoning, [])


def test_calls_follow_reasoning() -> None:
    plan = AnswerPlan(FORMS["hermes"], THINK, tools=TOOLS)
    text = "<think>which? <tool_call> maybe</think>\n" + hermes("add", "{}")
    assert read(plan, list(text)) == ("", "which? <tool_call> maybe", [("add", "{}")])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda part: st.lists(part) | st.dictionaries(st.text(), part)))
def test_the_scanner_takes_any_json_value_as_arguments(value: Any) -> None:
    text = json.dumps({"x": value, "name": "f", "arguments": value, "z": value})
    scanner = CallScanner()
    assert scanner.push(text + "tail") == len(text)
    assert scanner.is_done and scanner.name == "f" and json.loads(scanner.take()) == value


@given(st.text(st.sampled_from('{}[]":,\\ antm<>/_'), max_size=80))
@pytest.mark.parametrize("form", [*FORMS.values()], ids=lambda form: form.name)
def test_no_text_breaks_a_form(form: CallFormat, text: str) -> None:
    read(AnswerPlan(form, tools=TOOLS), ["<tool_call>", text, *form.marks, text, "<function=", text, '{"name":', text])


TEMPLATES = {
    "{% for m in messages %}<tool_call>\n{{ tools }}": "hermes",
    "<tool_call>{name}\n<arg_key>": "glm4",
    "<tool_call>\n<function=f>\n<parameter=p>": "qwen3_coder",
    "[TOOL_CALLS]": "mistral",
    "[gMASK]<sop>{% if tools %}<|observation|>": "glm4_lines",
    "<|start_header_id|>{{ tools }}": "llama3_json",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>": "deepseek",
    "<|im_start|>{{ messages }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_a_family_is_told_from_its_template(template: str, name: str | None) -> None:
    found = call_format_of(template)
    assert (found and found.name) == name
    assert reasoning_format_of("{% if x %}</think>{% endif %}") is THINK and reasoning_format_of(template) is None
