"""A constraint and a model that thinks first: what reaches the scheduler, and how the answer comes apart."""

import json
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details
from frontend.fake_scheduler import finished
from frontend.test_output_contract import chat

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.chat import compile_template
from pagecast_wire.sampling import ConstraintKind, FinishReason

OPENED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[:0] if tools }}"
    "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
)
HYBRID = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[:0] if tools }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
BRACKETS = "{% for m in messages %}{{ m.content }}{% endfor %}{# [THINK] [/THINK] #}{{ '[/THINK]'[:0] }}"
REGEX = pb.Constraint(regex="[ab]+")
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


def thinks(rig: Rig, template: str) -> None:
    rig.frontend.state.prompts.tokenizer.chat_template = compile_template(template)


def asked(constraint: pb.Constraint | None = REGEX, parse: bool | None = None, **fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        chat=pb.ChatPrompt(**{"messages": [pb.ChatMessage(role="user", content="hi")], **fields}), constraint=constraint,
        output=pb.OutputOptions(parse_reasoning=parse),
    )


TEXT = pb.GenerationSpec(prompt_text="hi", constraint=REGEX)
READ_TEXT = pb.GenerationSpec(prompt_text="hi", constraint=REGEX, output=pb.OutputOptions(parse_reasoning=True))


@pytest.mark.parametrize(
    ("template", "wanted", "marks"),
    [
        (OPENED, asked(), ("", "</think>")),
        (HYBRID, asked(), ("<think>", "</think>")),
        (HYBRID, asked(template_kwargs={"enable_thinking": True}), ("<think>", "</think>")),
        (HYBRID, asked(template_kwargs={"enable_thinking": False}), ("", "")),
        (HYBRID, asked(parse=False), ("", "")),
        (OPENED, asked(parse=False), ("", "")),
        (BRACKETS, asked(), ("[THINK]", "[/THINK]")),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", asked(), ("", "")),
        (HYBRID, TEXT, ("", "")),
        (HYBRID, READ_TEXT, ("<think>", "</think>")),
    ],
    ids=["opened", "hybrid", "on", "off", "not read", "opened, not read", "brackets", "no reasoning", "text", "text, read"],
)
async def test_where_a_constraint_begins_to_hold(rig: Rig, template: str, wanted: pb.GenerationSpec, marks: tuple[str, str]) -> None:
    thinks(rig, template)
    call = rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    constraint = (await rig.scheduler.accept()).sampling.constraint
    call.cancel()
    assert (constraint.kind, constraint.text) == (ConstraintKind.REGEX, "[ab]+")
    assert (constraint.opening, constraint.closing) == marks


THOUGHT = b"I wonder.\n</think>\n\nabba"


@pytest.mark.parametrize(("template", "written"), [(OPENED, THOUGHT), (HYBRID, b"<think>\n" + THOUGHT), (HYBRID, b"abba")])
async def test_reasoning_comes_apart_from_a_constrained_answer(rig: Rig, template: str, written: bytes) -> None:
    thinks(rig, template)
    call = rig.generation.Generate(pb.GenerateRequest(spec=asked()))
    submit = await rig.scheduler.accept()
    ids = [*written, 2]
    await rig.scheduler.tokens(submit.key, 0, ids, finished(submit.key, len(ids), FinishReason.STOP, 2))
    answer = await call
    (sequence,) = answer.sequences
    assert (sequence.text.rstrip("\2"), sequence.reasoning_text) == ("abba", "I wonder." if b"think" in written else "")
    assert list(sequence.token_ids) == ids and sequence.reason == pb.FINISH_REASON_CONSTRAINT_COMPLETE
    assert answer.effective.reasoning_format == "think"


async def test_a_forced_call_may_be_thought_about(rig: Rig) -> None:
    thinks(rig, HYBRID)
    call = rig.generation.Generate(pb.GenerateRequest(spec=chat(tool_choice=REQUIRED)))
    submit = await rig.scheduler.accept()
    assert submit.sampling.constraint.closing == "</think>" and "anyOf" in json.loads(submit.sampling.constraint.text)
    ids = [*b'<think>Rome.</think>\n{"name": "get_weather", "arguments": {"city": "Rome"}}', 2]
    await rig.scheduler.tokens(submit.key, 0, ids, finished(submit.key, len(ids), FinishReason.STOP, 2))
    (sequence,) = (await call).sequences
    assert [(c.name, c.arguments) for c in sequence.tool_calls] == [("get_weather", '{"city": "Rome"}')]
    assert (sequence.text.rstrip("\2"), sequence.reasoning_text) == ("", "Rome.")


async def test_a_bad_constraint_behind_reasoning_is_named_as_it_is_without(rig: Rig) -> None:
    found = []
    for template in ("{{ messages[0].content }}", HYBRID):
        thinks(rig, template)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.generation.Generate(pb.GenerateRequest(spec=asked(pb.Constraint(regex="(unclosed"))))
        (violation,) = details(error.value)[1]["BadRequest"].field_violations
        found.append((violation.field, violation.description))
    assert found[0] == found[1] and found[0][0] == "spec.constraint.regex"
