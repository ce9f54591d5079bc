"""Generate and GenerateStream over a real port: events, answers, ends."""

from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details
from frontend.fake_scheduler import finished, prompt

from pagecast.v1 import generation_pb2 as pb
from pagecast_wire.intake import Abort, Phase, Progress, Rejected, RejectReason, StopAt, Submit
from pagecast_wire.sampling import FinishReason


def spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(**{"prompt_token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})


async def rest_of(call: Any) -> list[Any]:
    """Everything that is still to come, by the same calls that the test used before."""
    events = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events.append(response)
    return events


def kind(response: Any) -> str:
    return response.event.WhichOneof("event")


async def test_a_stream_has_every_event_once_and_in_order(rig: Rig) -> None:
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(stopping=pb.StoppingOptions(max_output_tokens=4))))
    submit = await rig.scheduler.accept()
    accepted = (await call.read()).event.accepted
    assert prompt(submit) == [5, 6, 7] and submit.stop.max_output_tokens == 4
    assert (accepted.model, accepted.prompt_tokens, accepted.queue_position) == ("tiny", 3, 3)
    assert accepted.effective.seed == submit.sampling.seed and accepted.effective.max_output_tokens == 4
    assert dict(await call.initial_metadata())["x-request-id"] == accepted.request_id
    await rig.scheduler.tokens(submit.key, 0, [104])
    first = await call.read()
    assert (kind(first), first.event.tokens.text, list(first.event.tokens.token_ids)) == ("tokens", "h", [104])
    await rig.scheduler.tokens(submit.key, 1, [0xE4, 0xBD, 0xA0], finished(submit.key, 4))
    rest = await rest_of(call)
    assert [kind(r) for r in rest] == ["tokens", "sequence_finished", "completed"]
    assert rest[0].event.tokens.text == "你" and rest[0].event.tokens.first_token_offset == 1
    assert rest[1].event.sequence_finished.reason == pb.FINISH_REASON_LENGTH
    assert rest[2].event.completed.usage.output_tokens == 4
    assert [r.event.seq for r in [first, *rest]] == [2, 3, 4, 5]
    assert rig.scheduler.aborted() == []


async def test_generate_answers_once_with_everything(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="mine")))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104, 105])
    await rig.scheduler.tokens(submit.key, 2, [2], finished(submit.key, 3, FinishReason.STOP, 2))
    answer = await call
    assert (answer.request_id, answer.sequences[0].text, list(answer.sequences[0].token_ids)) == ("mine", "hi\x02", [104, 105, 2])
    assert answer.sequences[0].reason == pb.FINISH_REASON_STOP and answer.sequences[0].stop_token_id == 2
    assert answer.usage.prompt_tokens == 3 and answer.timings.total.nanos == 3_000_000
    assert dict(await call.initial_metadata())["x-request-id"] == "mine"
    assert submit.stop.max_output_tokens == 253


async def test_outputs_not_asked_for_stay_out(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(output=pb.OutputOptions(text=False))))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104], finished(submit.key, 1))
    answer = await call
    assert answer.sequences[0].text == "" and list(answer.sequences[0].token_ids) == [104]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_stop_text_across_tokens_ends_the_sequence(rig: Rig, streaming: bool) -> None:
    wanted = spec(stopping=pb.StoppingOptions(stop_texts=["END"]))
    if streaming:
        call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=wanted))
    else:
        call = rig.generation.Generate(pb.GenerateRequest(spec=wanted))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, list(b"oneE"))
    await rig.scheduler.tokens(submit.key, 4, list(b"NDx"))
    stop = await rig.scheduler.next(StopAt)
    assert (stop.key, stop.sequence, stop.keep) == (submit.key, 0, 6)
    await rig.scheduler.tokens(submit.key, 7, list(b"yz"))
    await rig.scheduler.finish(finished(submit.key, 6, FinishReason.STOP))
    if streaming:
        events = await rest_of(call)
        tokens = [r.event.tokens for r in events if kind(r) == "tokens"]
        text, ids = "".join(t.text for t in tokens), [i for t in tokens for i in t.token_ids]
        end = events[-2].event.sequence_finished
    else:
        end = (await call).sequences[0]
        text, ids = end.text, list(end.token_ids)
    assert (text, bytes(ids)) == ("one", b"oneEND")
    assert end.stop_text == "END" and end.reason == pb.FINISH_REASON_STOP and end.usage.output_tokens == 6


async def test_a_stop_text_outranks_a_length_end_of_the_same_step(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(stopping=pb.StoppingOptions(stop_texts=["b"], max_output_tokens=4))))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, list(b"abcd"), finished(submit.key, 4))
    sequence = (await call).sequences[0]
    assert (sequence.text, sequence.stop_text, sequence.usage.output_tokens, bytes(sequence.token_ids)) == ("a", "b", 2, b"ab")


@pytest.mark.parametrize("streaming", [True, False])
async def test_cancel_gives_exactly_one_abort(rig: Rig, streaming: bool) -> None:
    if streaming:
        call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec()))
    else:
        call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104])
    if streaming:
        await call.read()
    call.cancel()
    await rig.scheduler.next(Abort)
    # a whole second request later, there is still only the one
    other = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    second = await rig.scheduler.accept(2)
    await rig.scheduler.tokens(second.key, 0, [1], finished(second.key, 1))
    await other
    assert rig.scheduler.aborted() == [submit.key]


@pytest.mark.parametrize("streaming", [True, False])
async def test_cancel_before_acceptance_gives_exactly_one_abort(rig: Rig, streaming: bool) -> None:
    if streaming:
        call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(request_id="early")))
    else:
        call = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="early")))
    submit = await rig.scheduler.next(Submit)
    call.cancel()
    await rig.scheduler.next(Abort)
    again = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="early")))
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    second = await rig.scheduler.accept(2)
    await rig.scheduler.tokens(second.key, 0, [1], finished(second.key, 1))
    await again
    assert rig.scheduler.aborted() == [submit.key]


async def test_a_deadline_is_passed_on_and_ends_with_one_abort(rig: Rig) -> None:
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec()), timeout=5.0)
    submit = await rig.scheduler.accept()
    assert 0 < submit.deadline_ms <= 5100  # gRPC rounds the time left up on its way
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [submit.key]


async def test_a_full_queue_is_unavailable_with_retry_advice(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.next(Submit)
    await rig.scheduler.reject(Rejected(submit.key, RejectReason.OVERLOADED, retry_after_ms=300))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    _, found = details(caught.value)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert found["ErrorInfo"].reason == "OVERLOADED" and found["RetryInfo"].retry_delay.nanos == 300_000_000
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "300"
    assert rig.scheduler.aborted() == []


@pytest.mark.parametrize(
    ("reason", "code", "name"),
    [
        (FinishReason.NUMERIC_FAULT, grpc.StatusCode.INTERNAL, "NUMERIC_FAULT"),
        (FinishReason.WORKER_LOST, grpc.StatusCode.UNAVAILABLE, "WORKER_LOST"),
        (FinishReason.POISON_REQUEST, grpc.StatusCode.INTERNAL, "POISON_REQUEST"),
        (FinishReason.QUEUE_TIME_EXCEEDED, grpc.StatusCode.UNAVAILABLE, "QUEUE_TIME_EXCEEDED"),
        (FinishReason.CANCELLED, grpc.StatusCode.CANCELLED, "BY_CLIENT"),
        (FinishReason.CANCELLED_BY_API, grpc.StatusCode.CANCELLED, "BY_API"),
        (FinishReason.CANCELLED_BY_ADMIN, grpc.StatusCode.CANCELLED, "BY_ADMIN"),
    ],
)
async def test_failures_after_acceptance_say_how_far_it_got(rig: Rig, reason: FinishReason, code: grpc.StatusCode, name: str) -> None:
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104, 105])
    await call.read()
    await call.read()
    await rig.scheduler.finish(finished(submit.key, 2, reason))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest_of(call)
    assert caught.value.code() is code
    info = details(caught.value)[1]["ErrorInfo"]
    assert info.reason == name and info.metadata["emitted_tokens"] == "2" and info.metadata["last_seq"] == "2"
    assert rig.scheduler.aborted() == []


async def test_phase_changes_and_silence_give_progress(rig: Rig) -> None:
    delivery = pb.DeliveryOptions()
    delivery.progress_interval.FromSeconds(1)
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(), delivery=delivery))
    submit = await rig.scheduler.accept()
    await call.read()
    await rig.scheduler.progress(Progress(submit.key, Phase.PREFILLING, 0, 64, 200, 16))
    while (changed := (await call.read()).event.progress).phase != pb.PHASE_PREFILLING:
        pass  # silence before that, on a busy machine
    assert (changed.phase, changed.prefill_done, changed.prefill_total, changed.cached_prompt_tokens) == (pb.PHASE_PREFILLING, 64, 200, 16)
    quiet = (await call.read()).event.progress
    assert quiet.phase == pb.PHASE_PREFILLING and quiet.elapsed.ToMilliseconds() >= 900
    call.cancel()


async def test_a_request_id_that_the_scheduler_knows_is_refused(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="same")))
    submit = await rig.scheduler.next(Submit)
    assert submit.identity.request_id == "same" and not submit.identity.join
    await rig.scheduler.reject(Rejected(submit.key, RejectReason.REQUEST_ID_IN_USE))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found = details(caught.value)[1]
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS and found["ErrorInfo"].reason == "REQUEST_ID_IN_USE"
    assert (found["ResourceInfo"].resource_type, found["ResourceInfo"].resource_name) == ("pagecast.v1.Request", "same")


async def test_x_request_id_is_used_and_checked(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(("x-request-id", "from-header"),))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    assert (await call).request_id == "from-header"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(("x-request-id", "a"), ("x-request-id", "b")))
    assert details(caught.value)[1]["BadRequest"].field_violations[0].field == "metadata.x-request-id"


async def test_repeated_tokens_are_dropped_and_a_gap_is_an_internal_error(rig: Rig) -> None:
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [1, 2])
    await rig.scheduler.tokens(submit.key, 1, [2, 3], finished(submit.key, 3))
    assert list((await call).sequences[0].token_ids) == [1, 2, 3]
    broken = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    second = await rig.scheduler.accept(2)
    await rig.scheduler.tokens(second.key, 5, [1])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await broken
    assert caught.value.code() is grpc.StatusCode.INTERNAL and details(caught.value)[1]["ErrorInfo"].reason == "BUG"
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [second.key]
