"""Streams that are left, resumed, joined and cancelled by id, over a scheduler that does as the test says."""

import asyncio
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import finished
from frontend.test_grpc_lifecycle import collect, run_dir, spec, stream
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import delivery, engine_client
from pagecast_scheduler.frontend.chat import compile_template
from pagecast_scheduler.frontend.tokenizer import ByteTokenizer
from pagecast_wire.control import Attach, CancelReport, CancelRequests, Leave
from pagecast_wire.intake import Abort, Pause, Rejected, RejectReason, ServingState, StopAt, Submit

__all__ = ["run_dir"]
TEXT = ByteTokenizer(512)
GRACE = 30_000


def ids_of(text: str) -> list[int]:
    return list(TEXT.encode(text, False))


def resume(rig: Rig, request_id: str, *cursors: pb.SequenceCursor, **delivery: Any) -> Any:
    request = pb.ResumeStreamRequest(request_id=request_id, cursors=cursors, delivery=pb.DeliveryOptions(**delivery))
    return rig.generation.ResumeStream(request)


async def failure(call: Any) -> tuple[grpc.StatusCode, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), details(caught.value)[1]


async def begun(rig: Rig, ids: list[int], **fields: Any) -> tuple[Any, Submit]:
    """A stream whose reader has these tokens."""
    call = stream(rig, request_id="r", **fields)
    submit = await rig.scheduler.accept()
    await call.read()
    if ids:
        await rig.scheduler.tokens(submit.key, 0, ids)
        await call.read()
    return call, submit


@pytest.mark.parametrize("cut", range(1, 14))
@pytest.mark.parametrize("stops", [[], ["zz", "lohe"]])
async def test_a_resumed_stream_goes_on_where_the_reader_was(rig: Rig, cut: int, stops: list[str]) -> None:
    """At every token, inside characters and inside what may become a stop text."""
    told = "aé😀 helo lo "
    ids = ids_of(told)
    call, submit = await begun(rig, [], stopping=pb.StoppingOptions(stop_texts=stops))
    await rig.scheduler.tokens(submit.key, 0, ids[:cut])
    before, text = [], ""
    while len(before) < cut:
        event = (await call.read()).event.tokens
        before, text = before + list(event.token_ids), text + event.text
    call.cancel()
    again = resume(rig, "r", pb.SequenceCursor(next_token_offset=cut))
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.attach(attach, submit, ids[: cut + 1])
    await rig.scheduler.tokens(attach.key, cut, ids[cut:], finished(attach.key, len(ids)))
    after, rest, events = await collect(again)
    assert before + after == ids and text + rest == told
    accepted = events[0].accepted
    assert accepted.request_id == "r" and accepted.prompt_tokens == 3 and accepted.model_digest == "d1" * 32
    assert next(event.tokens.first_token_offset for event in events if event.WhichOneof("event") == "tokens") == cut
    assert [event.seq for event in events] == list(range(1, len(events) + 1)) and events[-1].WhichOneof("event") == "completed"


async def test_text_that_the_reader_has_beyond_its_tokens_is_not_repeated(rig: Rig) -> None:
    """What the end of a stream releases belongs to no token of its own."""
    ids = ids_of("ab€")[:4]  # the last character is cut off: its replacement comes at the very end
    call, submit = await begun(rig, ids)
    end = finished(submit.key, len(ids))
    for text_bytes, rest in ((2, "\ufffd"), (5, ""), (1, "b\ufffd"), (None, "\ufffd")):
        again = resume(rig, "r", pb.SequenceCursor(next_token_offset=4, text_bytes=text_bytes))
        attach = await rig.scheduler.next(Attach)
        await rig.scheduler.attach(attach, submit, ids, end)
        got, text, events = await collect(again)
        assert (got, text) == ([], rest) and events[-1].completed.usage.output_tokens == 4
        rig.scheduler.received.remove(attach)
    call.cancel()


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize(
    ("written", "reasoning", "held"),
    [("<think>\nso \n", "so", " \n"), ("<think>so</thi", "so", "</thi"), ("<think>so\n</thi", "so", "\n</thi")],
)
async def test_reasoning_that_the_end_releases_is_not_repeated(rig: Rig, written: str, reasoning: str, held: str, has_end: bool) -> None:
    """A stream that breaks between its last tokens and the word of their end."""
    rig.frontend.state.prompts.tokenizer.chat_template = compile_template("{{ messages[0].content }}{# <think> </think> #}")
    ids = ids_of(written)
    request = spec(request_id="r", output=pb.OutputOptions(parse_reasoning=True))
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=request))
    submit = await rig.scheduler.accept()
    assert (await call.read()).event.WhichOneof("event") == "accepted"
    end = finished(submit.key, len(ids))
    await rig.scheduler.tokens(submit.key, 0, ids, *([end] if has_end else []))
    have, num_tokens = "", 0
    while num_tokens < len(ids) or (has_end and have != reasoning + held):
        event = (await call.read()).event.tokens
        have, num_tokens = have + event.reasoning_text, num_tokens + event.num_tokens
    assert have == reasoning + (held if has_end else "")
    call.cancel()
    again = resume(rig, "r", pb.SequenceCursor(next_token_offset=len(ids), text_bytes=0, reasoning_bytes=len(have)))
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.attach(attach, submit, ids, end)
    _, text, events = await collect(again)
    have += "".join(event.tokens.reasoning_text for event in events if event.WhichOneof("event") == "tokens")
    assert (have, text) == (reasoning + held, "")


async def test_a_stop_text_found_on_resuming_ends_the_request(rig: Rig) -> None:
    call, submit = await begun(rig, ids_of("ab"), stopping=pb.StoppingOptions(stop_texts=["XY"]))
    call.cancel()
    again = resume(rig, "r", pb.SequenceCursor(next_token_offset=2))
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.attach(attach, submit, ids_of("abcXYdef"))
    stop = await rig.scheduler.next(StopAt)
    assert (stop.key, stop.keep) == (attach.key, 5)
    await rig.scheduler.finish(finished(attach.key, 5))
    ids, text, events = await collect(again)
    assert (ids, text) == (ids_of("cXY"), "c") and events[-2].sequence_finished.stop_text == "XY"


async def test_what_cannot_be_resumed(rig: Rig) -> None:
    code, found = await failure(resume(rig, "bad id"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and found["BadRequest"].field_violations[0].field == "request_id"
    code, found = await failure(resume(rig, "r", pb.SequenceCursor(), pb.SequenceCursor()))
    assert found["BadRequest"].field_violations[0].field == "cursors[1].sequence_index"
    unknown = resume(rig, "r")
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.reject(Rejected(attach.key, RejectReason.REQUEST_UNKNOWN))
    code, found = await failure(unknown)
    assert code is grpc.StatusCode.NOT_FOUND and found["ErrorInfo"].reason == "REQUEST_UNKNOWN"
    assert found["ResourceInfo"].resource_name == "r"


async def test_an_offset_beyond_the_tokens_is_refused_and_costs_the_request_nothing(rig: Rig) -> None:
    call, submit = await begun(rig, [7])
    again = resume(rig, "r", pb.SequenceCursor(next_token_offset=3))
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.attach(attach, submit, [7, 8])
    code, found = await failure(again)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found["BadRequest"].field_violations[0].field == "cursors[0].next_token_offset"
    leave = await rig.scheduler.next(Leave)
    assert leave.keys == (attach.key,) and leave.grace_ms > 0 and rig.scheduler.aborted() == []
    call.cancel()


@pytest.mark.parametrize("detach", [True, False])
async def test_what_a_broken_stream_leaves_behind(rig: Rig, detach: bool) -> None:
    options = {"on_disconnect": pb.ON_DISCONNECT_DETACH, "detach_grace": Duration(seconds=7)} if detach else {}
    request = pb.GenerateStreamRequest(spec=spec(), delivery=pb.DeliveryOptions(**options))
    call = rig.generation.GenerateStream(request)
    submit = await rig.scheduler.accept()
    await call.read()
    call.cancel()
    if detach:
        assert await rig.scheduler.next(Leave) == Leave((submit.key,), 7000, keeps=True)
        assert rig.scheduler.aborted() == []
    else:
        await rig.scheduler.next(Abort)
        assert rig.scheduler.aborted() == [submit.key] and rig.scheduler.all(Leave) == []


async def test_how_long_a_stream_may_ask_to_go_on_alone_is_the_operators_to_say(run_dir: Any) -> None:
    """--max-detach-grace-s: what who asks for nothing gets, and the most for who does; of a resumed stream as well."""
    rig = await start_rig(run_dir, max_detach_grace_s=5.0)
    detach = pb.ON_DISCONNECT_DETACH
    asked: list[dict[str, Any]] = [{}, {"detach_grace": Duration(seconds=5)}, {"detach_grace": Duration(nanos=250_000_000)}]
    for count, (options, granted_ms) in enumerate(zip(asked, (5000, 5000, 250), strict=True), 1):
        wanted = pb.DeliveryOptions(on_disconnect=detach, **options)
        call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(), delivery=wanted))
        submit = await rig.scheduler.accept(count)
        await call.read()
        call.cancel()
        assert await rig.scheduler.next(Leave, count) == Leave((submit.key,), granted_ms, keeps=True)
    longer: dict[str, Any] = {"on_disconnect": detach, "detach_grace": Duration(seconds=5, nanos=1_000_000)}
    asks = (
        rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(), delivery=pb.DeliveryOptions(**longer))),
        resume(rig, "r", pb.SequenceCursor(), **longer),
    )
    for call in asks:
        code, found = await failure(call)
        (violation,) = found["BadRequest"].field_violations
        assert code is grpc.StatusCode.INVALID_ARGUMENT and violation.field == "delivery.detach_grace" and "5" in violation.description
    await stop_rig(rig)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stream_that_outlasts_the_drain_says_how_to_go_on(run_dir: Any, signals: int) -> None:
    rig = await start_rig(run_dir, drain_timeout_s=0.3 if signals == 1 else 3600.0, drain_announce_s=0.0 if signals == 1 else 3600.0)
    call, submit = await begun(rig, [7, 8])
    for _ in range(signals):
        rig.frontend.end()
    ending = asyncio.create_task(rig.frontend.run_until_stopped())
    code, found = await failure(call)
    metadata = dict(found["ErrorInfo"].metadata)
    assert code is grpc.StatusCode.UNAVAILABLE and found["ErrorInfo"].reason == "DRAIN_TIMEOUT"
    assert metadata.items() >= {"request_id": "r", "emitted_tokens": "2", "last_seq": "2", "resumable": "true"}.items()
    await ending
    assert await rig.scheduler.next(Leave) == Leave((submit.key,), GRACE)
    await rig.channel.close()
    await rig.scheduler.close()


async def test_a_joined_request_is_shown_from_its_beginning_with_its_own_values(rig: Rig) -> None:
    call, first = await begun(rig, [7, 8])
    request = pb.GenerateStreamRequest(spec=spec(request_id="r", attach=True))
    joined = rig.generation.GenerateStream(request)
    second = await rig.scheduler.next(Submit, 2)
    assert second.identity.join and second.identity.digest == first.identity.digest
    await rig.scheduler.attach(second, first, [7, 8, 9], finished(first.key, 3))
    ids, _, events = await collect(joined)
    assert ids == [7, 8, 9] and events[0].accepted.effective.seed == first.sampling.seed != second.sampling.seed
    whole = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="r", attach=True)))
    await rig.scheduler.attach(await rig.scheduler.next(Submit, 3), first, [7, 8, 9], finished(first.key, 3))
    assert list((await whole).sequences[0].token_ids) == [7, 8, 9]
    call.cancel()


async def test_digests_tell_requests_apart(rig: Rig) -> None:
    calls = [stream(rig, request_id="a"), stream(rig, request_id="b", attach=True)]
    calls.append(stream(rig, request_id="c", cache=pb.CacheOptions(cache_scope="x")))
    await rig.scheduler.next(Submit, 3)
    digests = {submit.identity.request_id: submit.identity.digest for submit in rig.scheduler.all(Submit)}
    assert digests["a"] == digests["b"] != digests["c"]
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(("live", "ended", "result"), [(("r",), (), 1), ((), ("r",), 2), ((), (), None)])
async def test_cancel_generation(rig: Rig, live: tuple[str, ...], ended: tuple[str, ...], result: int | None) -> None:
    call = rig.generation.CancelGeneration(pb.CancelGenerationRequest(request_id="r"))
    question = await rig.scheduler.next(CancelRequests)
    assert question.request_ids == ("r",) and not question.every_owner
    await rig.scheduler.send(CancelReport(question.ticket, live, ended))
    if result is None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    else:
        assert (await call).result == result


async def test_a_question_to_a_scheduler_that_dies_is_told_so_when_there_is_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one was not asked: whoever waits for its answer waits in vain."""
    monkeypatch.setattr(engine_client, "ANSWER_S", 3600.0)
    call = rig.generation.CancelGeneration(pb.CancelGenerationRequest(request_id="r"), timeout=60)
    await rig.scheduler.next(CancelRequests)
    await rig.restart_scheduler()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and details(caught.value)[1]["ErrorInfo"].reason == "RECOVERING"
    assert rig.scheduler.all(CancelRequests) == []


async def test_a_resuming_reader_survives_the_scheduler(rig: Rig) -> None:
    """Also one that was not answered yet."""
    call, submit = await begun(rig, [7])
    call.cancel()
    early, late = resume(rig, "r", pb.SequenceCursor(next_token_offset=1)), None
    attach = await rig.scheduler.next(Attach)
    await rig.scheduler.attach(attach, submit, [7, 8])
    assert (await early.read()).event.accepted.request_id == "r"
    late = resume(rig, "other")
    await rig.scheduler.next(Attach, 2)
    scheduler = await rig.restart_scheduler()
    back = await scheduler.next(Submit)
    assert back.identity.join and back.identity.keep and back.history[0] == b"\x07\0\0\0\x08\0\0\0"
    asked = await scheduler.next(Attach)
    assert asked.request_id == "other"
    await scheduler.reject(Rejected(asked.key, RejectReason.REQUEST_UNKNOWN))
    assert (await failure(late))[0] is grpc.StatusCode.NOT_FOUND
    await scheduler.attach(back, submit, [7, 8, 9], finished(back.key, 3))
    ids, _, events = await collect(early)
    assert ids == [8, 9] and events[-1].WhichOneof("event") == "completed"


async def test_an_unread_request_ends_where_the_caller_wants_no_pause(rig: Rig) -> None:
    options = pb.DeliveryOptions(slow_consumer=pb.SLOW_CONSUMER_ABORT)
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(), delivery=options))
    submit = await rig.scheduler.accept()
    for start in range(0, 4_000_000, 20_000):
        await rig.scheduler.tokens(submit.key, start, [7] * 20_000)
        if rig.scheduler.aborted():
            break
        await asyncio.sleep(0)
    await rig.scheduler.next(Abort)
    assert rig.scheduler.all(Pause) == []
    code, found = await failure(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and found["ErrorInfo"].reason == "SLOW_CONSUMER"


@pytest.mark.parametrize("stops", [[], ["zz"]])
async def test_events_hold_at_most_so_many_tokens_and_text_keeps_to_them(rig: Rig, stops: list[str]) -> None:
    options = pb.DeliveryOptions(max_tokens_per_event=2)
    rules = pb.StoppingOptions(stop_texts=stops)
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(stopping=rules), delivery=options))
    submit = await rig.scheduler.accept()
    ids = ids_of("abcdefg")
    await rig.scheduler.tokens(submit.key, 0, ids, finished(submit.key, len(ids)))
    _, _, events = await collect(call)
    told = [(e.tokens.first_token_offset, e.tokens.num_tokens, e.tokens.text) for e in events if e.WhichOneof("event") == "tokens"]
    assert told == [(0, 2, "ab"), (2, 2, "cd"), (4, 2, "ef"), (6, 1, "g")]


async def test_output_gathers_for_the_flush_interval_but_the_end_does_not_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_FLUSH_S", 60.0)
    options = pb.DeliveryOptions(flush_interval=Duration(seconds=60))
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(), delivery=options))
    submit = await rig.scheduler.accept()
    await call.read()
    await rig.scheduler.tokens(submit.key, 0, [1])
    assert list((await call.read()).event.tokens.token_ids) == [1]
    for offset in range(1, 5):
        await rig.scheduler.tokens(submit.key, offset, [offset + 1])
        await asyncio.sleep(0.01)
    await rig.scheduler.tokens(submit.key, 5, [6], finished(submit.key, 6))
    events = [(await call.read()).event for _ in range(3)]
    assert list(events[0].tokens.token_ids) == [2, 3, 4, 5, 6] and events[2].WhichOneof("event") == "completed"
    assert await call.read() is grpc.aio.EOF
    trailer = dict(await call.trailing_metadata())["server-timing"]
    assert [part.split(";")[0] for part in trailer.split(", ")] == ["queue", "prefill", "decode", "total"]


async def test_a_stalled_engine_is_told_of_at_once_and_so_is_its_return(rig: Rig) -> None:
    call, submit = await begun(rig, [7])
    await rig.scheduler.set_state(ServingState.STALLED)
    assert (await call.read()).event.progress.phase == pb.PHASE_STALLED
    await rig.scheduler.set_state(ServingState.SERVING)
    assert (await call.read()).event.progress.phase == pb.PHASE_DECODING
    await rig.scheduler.tokens(submit.key, 1, [8], finished(submit.key, 2))
    ids, _, _ = await collect(call)
    assert ids == [8]
