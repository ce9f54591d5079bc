"""What a request may say beside prompt and sampling: an adapter, labels, truncation, raw bytes, credit; and counting tokens."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import finished, prompt
from frontend.test_grpc_generation import rest_of, spec
from frontend.test_output_contract import f32

from pagecast import Client, SamplingParams, requests
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from pagecast_scheduler.frontend import interceptor
from pagecast_wire import pack_u32
from pagecast_wire.intake import FrontendBatch, Pause, PromptLogprobs

LONG = list(range(3, 303))
"""More than the 256 tokens of the fake scheduler's engine."""


def stream(rig: Rig, wanted: pb.GenerationSpec, **delivery: Any) -> Any:
    return rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=wanted, delivery=pb.DeliveryOptions(**delivery)))


async def reason_of(call: Any) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found = details(caught.value)[1]
    return caught.value.code(), found["ErrorInfo"].reason, found


async def test_an_adapter_that_is_not_loaded_is_not_found(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(adapter="my-lora")))
    code, reason, found = await reason_of(call)
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_UNKNOWN")
    assert (found["ResourceInfo"].resource_type, found["ResourceInfo"].resource_name) == ("pagecast.v1.Adapter", "my-lora")


async def test_labels_reach_operators_and_logs_and_change_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(interceptor.log, "info", lambda event, **fields: lines.append(fields))
    digests = []
    for count, labels in enumerate(({"team": "search", "run/2": ""}, {}), 1):
        call = rig.generation.Generate(pb.GenerateRequest(spec=spec(labels=labels)))
        submit = await rig.scheduler.accept(count)
        assert submit.identity.labels == tuple(sorted(labels.items()))
        digests.append(submit.identity.digest)
        await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
        await call
    assert digests[0] == digests[1], "a retry with other labels joins all the same"
    async with asyncio.timeout(20):
        while len(told := [line["labels"] for line in lines if "labels" in line]) < 2:
            await asyncio.sleep(0.01)
    assert told[:2] == [{"team": "search", "run/2": ""}, None]


@pytest.mark.parametrize(
    ("end", "kept"), [(pb.TRUNCATE_START, LONG[54:]), (pb.TRUNCATE_END, LONG[:246])], ids=["start", "end"]
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_long_prompt_loses_the_end_that_the_caller_names(rig: Rig, end: Any, kept: list[int], streaming: bool) -> None:
    wanted = spec(truncate=end, prompt_token_ids=pb.TokenIds(ids=LONG), stopping=pb.StoppingOptions(max_output_tokens=10))
    call = stream(rig, wanted) if streaming else rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    assert prompt(submit) == kept and submit.stop.max_output_tokens == 10
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    if streaming:
        accepted = (await rest_of(call))[0].event.accepted
        assert (accepted.prompt_tokens, accepted.truncated_prompt_tokens) == (246, 54)
    else:
        assert (await call).truncated_prompt_tokens == 54


async def test_without_a_word_a_long_prompt_is_refused_and_a_short_one_is_left_whole(rig: Rig) -> None:
    for truncate in (pb.TRUNCATE_UNSPECIFIED, pb.TRUNCATE_NONE):
        call = rig.generation.Generate(pb.GenerateRequest(spec=spec(truncate=truncate, prompt_token_ids=pb.TokenIds(ids=LONG))))
        assert (await reason_of(call))[1] == "PROMPT_TOO_LONG"
    for wanted, kept in ((spec(truncate=pb.TRUNCATE_START), 3), (spec(truncate=pb.TRUNCATE_END, prompt_text="x" * 300), 255)):
        call = stream(rig, wanted)
        count = 1 if kept == 3 else 2
        submit = await rig.scheduler.accept(count)
        assert len(prompt(submit)) == kept  # nothing, or all that leaves room for one token
        call.cancel()


@pytest.mark.parametrize("streaming", [True, False])
async def test_raw_bytes_are_those_of_the_tokens(rig: Rig, streaming: bool) -> None:
    wanted = spec(output=pb.OutputOptions(raw_bytes=True, text=False, token_ids=False))
    call = stream(rig, wanted) if streaming else rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    cut = "é🙂".encode()
    await rig.scheduler.tokens(submit.key, 0, list(cut[:3]))
    await rig.scheduler.tokens(submit.key, 3, list(cut[3:]), finished(submit.key, len(cut)))
    if streaming:
        events = [r.event.tokens for r in await rest_of(call) if r.event.HasField("tokens")]
        assert b"".join(event.raw_bytes for event in events) == cut and not any(event.text for event in events)
        assert sum(event.num_tokens for event in events) == len(cut)
    else:
        sequence = (await call).sequences[0]
        assert (sequence.raw_bytes, sequence.text, list(sequence.token_ids)) == (cut, "", [])


async def test_raw_bytes_need_a_tokenizer_that_has_them(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.frontend.state.prompts.tokenizer, "piece_bytes", None)
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(output=pb.OutputOptions(raw_bytes=True))))
    assert (await reason_of(call))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_DISABLED")


@pytest.mark.parametrize(("positions", "told"), [(1, [7]), (2, [6, 7]), (3, [5, 6, 7]), (9, [5, 6, 7])])
async def test_the_last_positions_of_a_prompt_alone(rig: Rig, positions: int, told: list[int]) -> None:
    asked = pb.LogprobsOptions(top_n=1, max_positions=positions)
    call = stream(rig, spec(output=pb.OutputOptions(prompt_logprobs=asked)))
    submit = await rig.scheduler.accept()
    for at in (1, 2):
        part = PromptLogprobs(submit.key, at, 1, f32(-at), pack_u32([9]), f32(-0.5))
        await rig.scheduler.send(FrontendBatch(2, prompt_logprobs=(part,)))
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    prompts = [r.event.prompt for r in await rest_of(call) if r.event.HasField("prompt")]
    assert [record.token_id for event in prompts for record in event.logprobs] == told
    assert prompts[0].first_position == 3 - len(told)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_prompt_of_one_token_has_a_record_of_its_position(rig: Rig, streaming: bool) -> None:
    """No worker tells anything of it: nothing comes before a prompt's first token."""
    asked = pb.OutputOptions(prompt_logprobs=pb.LogprobsOptions(top_n=1))
    wanted = spec(prompt_token_ids=pb.TokenIds(ids=[7]), output=asked)
    call = stream(rig, wanted) if streaming else rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    if streaming:
        kinds = [(r.event.WhichOneof("event"), r.event) for r in await rest_of(call)]
        assert [kind for kind, _ in kinds] == ["accepted", "prompt", "tokens", "sequence_finished", "completed"]
        assert kinds[1][1].prompt.first_position == 0
        records = kinds[1][1].prompt.logprobs
    else:
        records = (await call).prompt_logprobs
    assert [(record.token_id, record.HasField("logprob")) for record in records] == [(7, False)]


async def test_a_small_credit_pauses_early(rig: Rig) -> None:
    """Tokens that wait behind a flush interval count too: what is unread is what no write has taken."""
    call = stream(rig, spec(), credit_tokens=4, flush_interval={"seconds": 1})
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [7])
    events = [await call.read(), await call.read()]  # accepted, and the first token at once
    assert rig.scheduler.all(Pause) == []
    await rig.scheduler.tokens(submit.key, 1, [7] * 5)
    assert (await rig.scheduler.next(Pause)).paused
    assert not (await rig.scheduler.next(Pause, 2)).paused  # all of it was written
    await rig.scheduler.finish(finished(submit.key, 6))
    events += await rest_of(call)
    assert sum(len(e.event.tokens.token_ids) for e in events) == 6


async def test_counting_is_tokenizing(rig: Rig) -> None:
    stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(rig.channel)
    counted = await stub.CountTokens(tokenizer_pb2.CountTokensRequest(text="hi 你"))
    assert (counted.num_tokens, counted.max_model_len) == (6, 256)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
    rendered = await stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
    assert (await stub.CountTokens(tokenizer_pb2.CountTokensRequest(chat=chat))).num_tokens == len(rendered.token_ids)
    for wrong, field in ((tokenizer_pb2.CountTokensRequest(), "input"), (tokenizer_pb2.CountTokensRequest(chat={}), "chat.messages")):
        _, reason, found = await reason_of(stub.CountTokens(wrong))
        assert reason == "FIELD_VIOLATION" and found["BadRequest"].field_violations[0].field == field
    with Client(rig.frontend.address) as client:
        counts = await asyncio.to_thread(lambda: (client.count_tokens("hi 你"), client.count_tokens([{"role": "user", "content": "hi"}])))
        assert counts == (6, len(rendered.token_ids))
        (model,) = await asyncio.to_thread(client.models)
        assert len(bytes.fromhex(model.tokenizer_digest)) == 32 and model.limits.max_labels == 16


def test_the_client_says_all_of_it() -> None:
    options: requests.RequestOptions = {
        "labels": {"a": "b"}, "truncate": "start", "adapter": "x", "credit_tokens": 8, "slow_consumer": "abort",
    }  # fmt: skip
    made = requests.generation_spec("hi", SamplingParams(prompt_logprobs=1, prompt_logprobs_positions=4, raw_bytes=True), options)
    assert (dict(made.labels), made.truncate, made.adapter) == ({"a": "b"}, pb.TRUNCATE_START, "x")
    assert made.output.raw_bytes and made.output.prompt_logprobs.max_positions == 4
    assert requests.delivery(options) == pb.DeliveryOptions(credit_tokens=8, slow_consumer=pb.SLOW_CONSUMER_ABORT)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        requests.generation_spec("hi", SamplingParams(prompt_logprobs_positions=4), {})


async def test_the_limit_of_metadata_is_settable(folder: Path) -> None:
    rig = await start_rig(folder, max_metadata_bytes=64 << 10)
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(("x-other", "x" * (48 << 10)),))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await call
    await stop_rig(rig)
