"""The output contract over a real port and a fake scheduler: n, log-probabilities, constraints, tool calls, usage of failed calls."""

import asyncio
import dataclasses
import json
import struct
from typing import Any

import grpc
import jsonschema
import pytest
from frontend.conftest import Rig, details
from frontend.fake_scheduler import finished, prompt, usage
from frontend.test_grpc_generation import kind, rest_of, spec

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import events, streams
from pagecast_wire import pack_u32, pack_u64, view_u32
from pagecast_wire.intake import Abort, Finished, FrontendBatch, PromptLogprobs, StopAt, Submit, TokenLogprobs
from pagecast_wire.sampling import ConstraintFault, ConstraintKind, FinishReason


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def stream(rig: Rig, wanted: pb.GenerationSpec) -> Any:
    return rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=wanted))


async def several(rig: Rig, key: int, rows: dict[int, tuple[int, list[int]]], ends: tuple[Finished, ...] = ()) -> None:
    """One batch with tokens of several sequences: index to (offset, ids)."""
    offsets = pack_u32([offset for offset, _ in rows.values()])
    counts = pack_u32([len(ids) for _, ids in rows.values()])
    tokens = pack_u32([i for _, ids in rows.values() for i in ids])
    await rig.scheduler.send(
        FrontendBatch(2, pack_u64([key] * len(rows)), pack_u32(list(rows)), offsets, counts, tokens, finished=ends)
    )


async def test_every_sampling_value_reaches_the_scheduler_and_comes_back_as_effective(rig: Rig) -> None:
    options = pb.SamplingOptions(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, presence_penalty=1, frequency_penalty=-2, repetition_penalty=1.5,
        num_sequences=2, logit_bias=[pb.TokenBias(token_id=9, bias=-100)], allowed_token_ids=pb.TokenIds(ids=[9, 11]),
        bad_words=["ab"], bad_token_sequences=[pb.TokenIds(ids=[1, 2, 3])], seed=(1 << 64) - 1,
    )  # fmt: skip
    output = pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=20), prompt_logprobs=pb.LogprobsOptions(), skip_special_tokens=False)
    call = stream(rig, spec(sampling=options, output=output, stopping=pb.StoppingOptions(include_stop_in_output=True, ignore_eos=True)))
    submit = await rig.scheduler.accept()
    effective = (await call.read()).event.accepted.effective
    s = submit.sampling
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty, submit.num_sequences) == (1, -2, 1.5, 2)
    assert list(view_u32(s.logit_bias_ids)) == [9] and s.logit_bias_values == f32(-100) and list(view_u32(s.allowed_token_ids)) == [9, 11]
    words = list(view_u32(s.bad_word_tokens))
    assert words == [1, 2, 3, *b"ab", *b" ab"] and list(view_u32(s.bad_word_lengths)) == [3, 2, 3]
    assert (s.num_logprobs, s.num_prompt_logprobs, submit.bypass_prefix_cache) == (20, 0, True)
    expected = pb.EffectiveParameters(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=(1 << 64) - 1, max_output_tokens=253, presence_penalty=1,
        frequency_penalty=-2, repetition_penalty=1.5, num_sequences=2, ignore_eos=True, include_stop_in_output=True, logprobs_top_n=20,
        prompt_logprobs_top_n=0,
    )  # fmt: skip
    assert effective == expected
    call.cancel()


async def whole(rig: Rig, outputs: list[list[int]], step: int) -> pb.GenerateResponse:
    """The answer of Generate for these outputs, which come so many tokens at a time, each with its log-probability."""
    output = pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=1), raw_bytes=True)
    wanted = spec(request_id="one", sampling=pb.SamplingOptions(num_sequences=2, seed=1), output=output)
    call = rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept(len(rig.scheduler.all(Submit)) + 1)
    for at in range(0, max(map(len, outputs)), step):
        rows = {index: (at, ids[at : at + step]) for index, ids in enumerate(outputs) if at < len(ids)}
        records = [
            TokenLogprobs(submit.key, index, first + i, -0.5 * token, pack_u32([token]), f32(-0.5 * token))
            for index, (first, ids) in rows.items() for i, token in enumerate(ids)
        ]  # fmt: skip
        ends = [index for index, ids in enumerate(outputs) if at < len(ids) <= at + step]
        finish = tuple(Finished(submit.key, index, FinishReason.LENGTH, usage(len(outputs[index]))) for index in ends)
        batch = FrontendBatch(
            2, pack_u64([submit.key] * len(rows)), pack_u32(list(rows)), pack_u32([first for first, _ in rows.values()]),
            pack_u32([len(ids) for _, ids in rows.values()]), pack_u32([i for _, ids in rows.values() for i in ids]), finished=finish,
            logprobs=tuple(records),
        )  # fmt: skip
        await rig.scheduler.send(batch)
        await asyncio.sleep(0.002)  # the front end's turn
    answer: pb.GenerateResponse = await call
    return answer


async def test_a_whole_answer_is_the_same_however_its_output_came(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [[*"né".encode(), 0xE4, 0xBD], [*"你好, and all of: ".encode(), *range(32, 126), 0xF0, 0x9F]]  # each ends within a character
    at_once = await whole(rig, outputs, 1000)
    assert [list(s.token_ids) for s in at_once.sequences] == outputs
    assert [len(s.logprobs) for s in at_once.sequences] == [len(ids) for ids in outputs]
    assert [s.raw_bytes for s in at_once.sequences] == [bytes(ids) for ids in outputs] and at_once.sequences[0].text == "né\ufffd"
    written: list[int] = []
    strings: list[str | bytes] = []

    def gather(self: events.WholeAnswer, as_ever: Any = events.WholeAnswer.gather) -> pb.GenerateResponse:
        response: pb.GenerateResponse = as_ever(self)
        written.append(len(response.sequences[1].token_ids))
        strings.extend((response.sequences[1].text, response.sequences[1].raw_bytes))
        return response

    monkeypatch.setattr(events.WholeAnswer, "gather", gather)
    monkeypatch.setattr(streams, "GATHER_TOKENS", 2)
    assert await whole(rig, outputs, 1) == at_once
    assert len(set(written)) > 10  # it was written while it grew
    assert not any(strings)  # but these, of which a message would keep each that a longer one took the place of


@pytest.mark.parametrize("streaming", [True, False])
async def test_several_sequences_are_told_apart_and_usage_counts_the_prompt_once(rig: Rig, streaming: bool) -> None:
    wanted = spec(sampling=pb.SamplingOptions(num_sequences=3), stopping=pb.StoppingOptions(stop_texts=["!"]))
    call = stream(rig, wanted) if streaming else rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    await several(rig, submit.key, {0: (0, list(b"a")), 1: (0, list(b"bb")), 2: (0, list(b"c!x"))})
    stop = await rig.scheduler.next(StopAt)
    assert (stop.sequence, stop.keep) == (2, 2)
    ends = (Finished(submit.key, 2, FinishReason.STOP, usage(2)), Finished(submit.key, 0, FinishReason.STOP, usage(2), 2))
    await several(rig, submit.key, {0: (1, [2]), 1: (2, list(b"b"))}, ends)
    await rig.scheduler.finish(Finished(submit.key, 1, FinishReason.LENGTH, usage(3)))
    if streaming:
        events = [r.event for r in await rest_of(call)]
        texts = ["".join(e.tokens.text for e in events if e.tokens.sequence_index == i) for i in range(3)]
        done = sorted((e.sequence_finished for e in events if e.HasField("sequence_finished")), key=lambda e: e.sequence_index)
        total = events[-1].completed.usage
        assert [e.seq for e in events] == list(range(1, len(events) + 1))
    else:
        answer = await call
        done, total = list(answer.sequences), answer.usage
        texts = [s.text for s in done]
    assert texts == ["a\x02", "bbb", "c"]
    assert [d.sequence_index for d in done] == [0, 1, 2]
    assert [d.WhichOneof("matched_stop") for d in done] == ["stop_token_id", None, "stop_text"]
    assert [d.usage.output_tokens for d in done] == [2, 3, 2] and (total.prompt_tokens, total.output_tokens) == (3, 7)


@pytest.mark.parametrize("streaming", [True, False])
async def test_logprobs_stand_beside_their_ids_and_end_with_them(rig: Rig, streaming: bool) -> None:
    output = pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=2), prompt_logprobs=pb.LogprobsOptions(top_n=1))
    wanted = spec(output=output, stopping=pb.StoppingOptions(stop_texts=["c"]))
    call = stream(rig, wanted) if streaming else rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    ids = list(b"abcd")
    part = PromptLogprobs(submit.key, 1, 1, f32(-1, -2), pack_u32([6, 8]), f32(-1, -0.5))
    await rig.scheduler.send(FrontendBatch(2, prompt_logprobs=(part,)))
    await rig.scheduler.send(FrontendBatch(2, prompt_logprobs=(part,)))  # a request submitted again begins anew
    records = tuple(TokenLogprobs(submit.key, 0, at, -at, pack_u32([i, 300]), f32(-at, -9)) for at, i in enumerate(ids))
    columns = (pack_u64([submit.key]), pack_u32([0]), pack_u32([0]), pack_u32([4]), pack_u32(ids))
    await rig.scheduler.send(FrontendBatch(3, *columns, logprobs=records))
    await rig.scheduler.finish(finished(submit.key, 3, FinishReason.STOP))
    if streaming:
        events = [r.event for r in await rest_of(call)]
        kinds = [e.WhichOneof("event") for e in events]
        assert kinds.index("prompt") < kinds.index("tokens") and kinds.count("prompt") == 1
        told = [r for e in events for r in e.prompt.logprobs]
        got = [(i, r) for e in events for i, r in zip(e.tokens.token_ids, e.tokens.logprobs, strict=True)]
    else:
        answer = await call
        told, got = list(answer.prompt_logprobs), list(zip(answer.sequences[0].token_ids, answer.sequences[0].logprobs, strict=True))
    assert [(i, r.token_id, r.logprob, r.token_bytes) for i, r in got] == [(c, c, -at, bytes([c])) for at, c in enumerate(b"abc")]
    assert [(t.token_id, t.logprob) for t in got[1][1].top] == [(98, -1), (300, -9)]
    assert [(r.token_id, r.HasField("logprob"), r.logprob) for r in told] == [(5, False, 0), (6, True, -1), (7, True, -2)]
    assert [t.token_id for t in told[2].top] == [8] and not told[0].top


async def test_the_stop_text_can_be_kept(rig: Rig) -> None:
    wanted = spec(stopping=pb.StoppingOptions(stop_texts=["END"], include_stop_in_output=True))
    call = rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, list(b"oneENDx"), finished(submit.key, 7))
    sequence = (await call).sequences[0]
    assert (sequence.text, sequence.stop_text, bytes(sequence.token_ids)) == ("oneEND", "END", b"oneEND")


CONSTRAINTS: dict[str, tuple[pb.Constraint, ConstraintKind]] = {
    "json_schema": (pb.Constraint(json_schema='{"type": "integer"}'), ConstraintKind.JSON_SCHEMA),
    "json_object": (pb.Constraint(json_object=pb.JsonObject()), ConstraintKind.JSON_OBJECT),
    "regex": (pb.Constraint(regex="[ab]+"), ConstraintKind.REGEX),
    "choices": (pb.Constraint(choices=pb.Choices(texts=["yes", "yes!"])), ConstraintKind.CHOICES),
    "grammar": (pb.Constraint(grammar='start: "a" | start "b"'), ConstraintKind.GRAMMAR),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_constraints_reach_the_scheduler_and_end_as_complete(rig: Rig, name: str) -> None:
    constraint, wire_kind = CONSTRAINTS[name]
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(constraint=constraint, stopping=pb.StoppingOptions(ignore_eos=True))))
    submit = await rig.scheduler.accept()
    assert list(view_u32(submit.stop.stop_token_ids)) == [2]
    sent = submit.sampling.constraint
    assert sent.kind is wire_kind
    if name == "choices":
        assert json.loads(sent.text) == ["yes", "yes!"]
    elif name != "json_object":
        assert sent.text == getattr(constraint, name)
    await rig.scheduler.tokens(submit.key, 0, [49, 2], finished(submit.key, 2, FinishReason.STOP, 2))
    assert (await call).sequences[0].reason == pb.FINISH_REASON_CONSTRAINT_COMPLETE


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": "{"}, "json_schema", "JSON"),
    ({"json_schema": "[]"}, "json_schema", "schemas"),
    ({"json_schema": '{"type": "array", "items": {"uniqueItems": true}}'}, "json_schema", '"uniqueItems" at /items'),
    ({"json_schema": '{"$ref": "http://example.com/x.json"}'}, "json_schema", "nothing is fetched"),
    ({"json_schema": nested(65)}, "json_schema", "64 deep"),
    ({"json_schema": nested(1000)}, "json_schema", "64 deep"),
    ({"json_schema": nested(9000)}, "json_schema", "64 deep"),
    ({"json_schema": json.dumps({"enum": list(range(100_000))})}, "json_schema", "bytes"),
    ({"json_schema": '{"allOf": [{"type": "string"}, {"type": "integer"}]}'}, "json_schema", "Unsatisfiable"),
    ({"json_schema": '{"type": "string", "format": "nonsense"}'}, "json_schema", "nonsense"),
    ({"json_schema": '{"type": "string", "pattern": "(?=a)b"}'}, "json_schema", "look-around"),
    ({"regex": "(a"}, "regex", "unclosed"),
    ({"regex": "(a)\\1"}, "regex", "backreferences"),
    ({"regex": ""}, "regex", "empty"),
    ({"regex": "[^\\s\\S]"}, "regex", "no text"),
    ({"regex": "a" * (1 << 18)}, "regex", "bytes"),
    ({"grammar": "start: start"}, "grammar", ""),
    ({"grammar": "begin: \"a\""}, "grammar", "start"),
    ({"grammar": ""}, "grammar", "empty"),
    ({"choices": pb.Choices()}, "choices.texts", "1 to"),
    ({"choices": pb.Choices(texts=["a", "b", "a"])}, "choices.texts[2]", "once"),
    ({"choices": pb.Choices(texts=["a", ""])}, "choices.texts[1]", "empty"),
    ({"choices": pb.Choices(texts=[str(i) for i in range(1025)])}, "choices.texts", "1024"),
]


async def test_bad_constraints_are_refused_by_name_before_they_are_submitted(rig: Rig) -> None:
    for fields, path, word in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generation.Generate(pb.GenerateRequest(spec=spec(constraint=pb.Constraint(**fields))))
        status, found = details(caught.value)
        (violation,) = found["BadRequest"].field_violations
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and found["ErrorInfo"].reason == "CONSTRAINT_INVALID"
        assert violation.field == f"spec.constraint.{path}" and word in violation.description, (fields, status)
    assert rig.scheduler.all(Submit) == []


async def test_a_constraint_that_cannot_be_followed_says_why(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(constraint=pb.Constraint(regex="[a]"))))
    submit = await rig.scheduler.accept()
    end = Finished(submit.key, 0, FinishReason.CONSTRAINT_FAILED, usage(0), constraint_fault=ConstraintFault.NO_TOKEN)
    await rig.scheduler.finish(end)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    _, found = details(caught.value)
    assert found["ErrorInfo"].reason == "CONSTRAINT_FAILED" and found["ErrorInfo"].metadata["fault"] == "NO_TOKEN"
    assert [v.field for v in found["BadRequest"].field_violations] == ["spec.constraint"]


WEATHER = pb.Tool(name="get_weather", parameters_json_schema='{"type": "object", "properties": {"city": {"type": "string"}}}')


def chat(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(chat=pb.ChatPrompt(**{"messages": [pb.ChatMessage(role="user", content="hi")], "tools": [WEATHER], **fields}))


async def test_tool_calls_stream_as_typed_fields(rig: Rig) -> None:
    call = stream(rig, chat())
    submit = await rig.scheduler.accept()
    assert b"get_weather" in bytes(prompt(submit))
    assert (await call.read()).event.accepted.effective.tool_call_format == "hermes"
    written = b'Sure. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    for at in range(0, len(written), 9):
        await rig.scheduler.tokens(submit.key, at, list(written[at : at + 9]))
    await rig.scheduler.finish(finished(submit.key, len(written)))
    tokens = [r.event.tokens for r in await rest_of(call) if kind(r) == "tokens"]
    pieces = [piece for event in tokens for piece in event.tool_calls]
    assert "".join(t.text for t in tokens) == "Sure." and bytes(i for t in tokens for i in t.token_ids) == written
    assert [p.name for p in pieces if p.id] == ["get_weather"] and "".join(p.arguments for p in pieces) == '{"city": "Rome"}'


async def test_a_forced_call_is_a_constraint_and_comes_back_typed(rig: Rig) -> None:
    required = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name="get_weather")
    call = rig.generation.Generate(pb.GenerateRequest(spec=chat(tool_choice=required)))
    submit = await rig.scheduler.accept()
    (wanted,) = json.loads(submit.sampling.constraint.text)["anyOf"]
    assert wanted["properties"]["name"] == {"const": "get_weather"}
    written = list(b'{"name":"get_weather","arguments":{"city":"Rome"}}')
    await rig.scheduler.tokens(submit.key, 0, [*written, 2], finished(submit.key, len(written) + 1, FinishReason.STOP, 2))
    (sequence,) = (await call).sequences
    assert [(c.name, c.arguments) for c in sequence.tool_calls] == [("get_weather", '{"city":"Rome"}')]


NESTED = {"properties": {"a": {"$ref": "#/$defs/p"}}, "required": ["a"], "$defs": {"p": {"type": "integer"}}}


async def test_a_forced_call_takes_schemas_with_references(rig: Rig) -> None:
    tools = [pb.Tool(name="go", parameters_json_schema=json.dumps(NESTED))]
    call = rig.generation.Generate(pb.GenerateRequest(spec=chat(tools=tools, tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED))))
    submit = await rig.scheduler.accept()  # it compiles, so it was accepted
    call.cancel()
    validator = jsonschema.Draft202012Validator(json.loads(submit.sampling.constraint.text))
    assert validator.is_valid({"name": "go", "arguments": {"a": 1}})
    assert not validator.is_valid({"name": "go", "arguments": {"a": "1"}})


IMAGE = pb.ContentPart(image=pb.Media(mime_type="image/png", uri="http://example.com/x.png"))
AUDIO = pb.ContentPart(audio=pb.Media(data=b"x"))


REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
HALF = '{"a": ["\\ud83d"]}'
"""JSON that is fine, of a text that has no encoding."""


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def called(arguments: str) -> pb.ChatMessage:
    return pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments=arguments)])


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        (chat(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart(text="x"), IMAGE])]), "spec.chat.messages[0].parts[1].image"),
        (chat(messages=[pb.ChatMessage(role="user", parts=[AUDIO])]), "spec.chat.messages[0].parts[0].audio"),
        (chat(tools=[WEATHER, WEATHER]), "spec.chat.tools[1].name"),
        (chat(tools=[pb.Tool(name="a b")]), "spec.chat.tools[0].name"),
        (chat(tools=[pb.Tool(name="a", parameters_json_schema="[]")]), "spec.chat.tools[0].parameters_json_schema"),
        (chat(tools=[], tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)), "spec.chat.tool_choice.mode"),
        (chat(tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name="other")), "spec.chat.tool_choice.name"),
        (chat(template_kwargs={"messages": []}), "spec.chat.template_kwargs.messages"),
        (chat(template_kwargs={"x": "y" * 20000}), "spec.chat.template_kwargs"),
        (chat(template_kwargs={"x": [1.0, {"y": float("nan")}]}), "spec.chat.template_kwargs.x"),
        (chat(template_kwargs={"x": float("-inf")}), "spec.chat.template_kwargs.x"),
        (chat(tools=[pb.Tool(name="a", parameters_json_schema=deep(600))], tool_choice=REQUIRED),
         "spec.chat.tools[0].parameters_json_schema"),
        (chat(tools=[pb.Tool(name="a", parameters_json_schema=HALF)]), "spec.chat.tools[0].parameters_json_schema"),
        (chat(messages=[called(HALF)]), "spec.chat.messages[0].tool_calls[0].arguments"),
        (chat(messages=[called(deep(100_000))]), "spec.chat.messages[0].tool_calls[0].arguments"),
        (spec(output=pb.OutputOptions(parse_reasoning=True)), "spec.output.parse_reasoning"),
        (spec(sampling=pb.SamplingOptions(allowed_token_ids=pb.TokenIds(ids=[2])), stopping=pb.StoppingOptions(min_output_tokens=1)),
         "spec.sampling.allowed_token_ids.ids"),
        (spec(sampling=pb.SamplingOptions(bad_words=["x" * 40])), "spec.sampling.bad_words[0]"),
    ],
)  # fmt: skip
async def test_what_needs_the_model_is_refused_by_path(rig: Rig, wanted: pb.GenerationSpec, path: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=wanted), timeout=30)
    _, found = details(caught.value)
    assert path in [v.field for v in found["BadRequest"].field_violations]


async def test_a_failed_call_tells_its_usage(rig: Rig) -> None:
    call = stream(rig, spec())
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104, 105])
    await rig.scheduler.finish(finished(submit.key, 2, FinishReason.NUMERIC_FAULT))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    told = details(caught.value)[1]["ErrorInfo"].metadata
    assert {name: told[name] for name in ("prompt_tokens", "cached_prompt_tokens", "output_tokens", "recomputed_tokens")} == {
        "prompt_tokens": "3", "cached_prompt_tokens": "1", "output_tokens": "2", "recomputed_tokens": "0",
    }  # fmt: skip


async def test_an_answer_that_would_not_fit_a_message_is_refused_and_a_stream_is_not(rig: Rig) -> None:
    wanted = spec(
        sampling=pb.SamplingOptions(num_sequences=64), stopping=pb.StoppingOptions(max_output_tokens=250),
        output=pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=20), prompt_logprobs=pb.LogprobsOptions(top_n=20)),
    )  # fmt: skip
    small = spec(stopping=pb.StoppingOptions(max_output_tokens=250), output=pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=20)))
    rig.frontend.state.config = dataclasses.replace(rig.frontend.state.config, max_message_bytes=1 << 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    assert [v.field for v in details(caught.value)[1]["BadRequest"].field_violations] == ["spec.stopping.max_output_tokens"]
    call = stream(rig, wanted)
    await rig.scheduler.accept()
    call.cancel()
    fits = rig.generation.Generate(pb.GenerateRequest(spec=small))
    await rig.scheduler.accept(2)
    fits.cancel()


async def test_token_rules_that_leave_no_token_are_named_without_a_constraint(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    end = Finished(submit.key, 0, FinishReason.CONSTRAINT_FAILED, usage(0), constraint_fault=ConstraintFault.NO_TOKEN)
    await rig.scheduler.finish(end)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert [v.field for v in details(caught.value)[1]["BadRequest"].field_violations] == ["spec.sampling"]


async def test_when_one_sequence_fails_the_others_are_aborted(rig: Rig) -> None:
    call = stream(rig, spec(sampling=pb.SamplingOptions(num_sequences=2)))
    submit = await rig.scheduler.accept()
    await several(rig, submit.key, {0: (0, [104]), 1: (0, [105])})
    await rig.scheduler.finish(Finished(submit.key, 1, FinishReason.NUMERIC_FAULT, usage(1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert details(caught.value)[1]["ErrorInfo"].reason == "NUMERIC_FAULT"
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [submit.key]
