"""Requests that nobody reads: what a front end remembers of them, and brings to a scheduler that knows nothing."""

from typing import Any

import pytest
from frontend.conftest import Rig
from frontend.fake_scheduler import Ready, finished, history
from frontend.test_grpc_lifecycle import collect, spec, until
from frontend.test_grpc_resume import ids_of
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import keeping, streams
from pagecast_wire import pack_u32, pack_u64
from pagecast_wire.control import EarlierLogprobs, Kept, Leave
from pagecast_wire.intake import FrontendBatch, StopAt, Submit, TokenLogprobs
from pagecast_wire.sampling import FinishReason

DETACH = pb.DeliveryOptions(on_disconnect=pb.ON_DISCONNECT_DETACH, detach_grace=Duration(seconds=60))


async def left(rig: Rig, request_id: str, ids: list[int], **fields: Any) -> Submit:
    """A request whose reader had these tokens, and has gone."""
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(request_id=request_id, **fields), delivery=DETACH))
    submit = await rig.scheduler.until(
        lambda: next((s for s in rig.scheduler.all(Submit) if s.identity.request_id == request_id), None)
    )  # fmt: skip
    await rig.scheduler.accept(rig.scheduler.all(Submit).index(submit) + 1)
    await call.read()
    if ids:
        await rig.scheduler.tokens(submit.key, 0, ids)
        await call.read()
    call.cancel()
    leave = await rig.scheduler.until(lambda: next((m for m in rig.scheduler.all(Leave) if m.keys == (submit.key,)), None))
    assert leave.keeps
    return submit


async def test_a_request_that_nobody_reads_is_brought_back_with_all_that_came_meanwhile(rig: Rig) -> None:
    submit = await left(rig, "r", [7, 8])
    await rig.scheduler.tokens(submit.key, 2, [9, 10])
    await until(lambda: any(s.num_output_tokens == 4 for live in rig.frontend.state.engine._live.values() for s in live.sequences))
    for expected in ([7, 8, 9, 10], [7, 8, 9, 10, 11]):
        scheduler = await rig.restart_scheduler()
        back = await scheduler.next(Submit)
        assert history(back) == expected and back.identity.join and back.identity.request_id == "r"
        again = await scheduler.next(Leave)
        assert again.keys == (back.key,) and again.keeps and 0 < again.grace_ms <= 60_000
        await scheduler.next(Ready)
        order = [type(m) for m in scheduler.received]
        assert order.index(Submit) < order.index(Leave) < order.index(Ready)
        await scheduler.tokens(back.key, len(expected), [len(expected) + 7])
        await until(lambda: any(s.num_output_tokens > 4 for live in rig.frontend.state.engine._live.values() for s in live.sequences))


async def test_what_ended_is_brought_back_as_ended_read_or_not(rig: Rig) -> None:
    unread = await left(rig, "unread", [7])
    await rig.scheduler.tokens(unread.key, 1, [8, 9], finished(unread.key, 3))
    failed = await left(rig, "failed", [7])
    await rig.scheduler.finish(finished(failed.key, 1, FinishReason.NUMERIC_FAULT))
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(request_id="read")))
    read = await rig.scheduler.accept(3)
    await rig.scheduler.tokens(read.key, 0, [4, 5], finished(read.key, 2))
    await collect(call)
    whole = rig.generation.Generate(pb.GenerateRequest(spec=spec(request_id="whole")))
    unary = await rig.scheduler.accept(4)
    await rig.scheduler.tokens(unary.key, 0, [1], finished(unary.key, 1))
    await whole
    await until(lambda: len(rig.frontend.state.engine._kept) == 3)
    scheduler = await rig.restart_scheduler()
    await scheduler.next(Ready)
    kept = {m.attached.submit.identity.request_id: m for m in scheduler.all(Kept)}
    assert kept.keys() == {"unread", "failed", "read"} and scheduler.all(Submit) == []
    assert history(kept["unread"].attached.submit) == [7, 8, 9] and history(kept["read"].attached.submit) == [4, 5]
    assert kept["unread"].attached.finished[0].usage.output_tokens == 3 and kept["read"].attached.queue_position == 3
    assert kept["failed"].attached.finished[0].reason is FinishReason.NUMERIC_FAULT
    assert all(0 < m.left_ms <= 60_000 and m.key >> 40 == 1 for m in kept.values())
    assert len({m.key for m in kept.values()}) == 3


async def test_log_probabilities_and_stop_texts_come_back_too(rig: Rig) -> None:
    wishes = {"output": pb.OutputOptions(logprobs=pb.LogprobsOptions()), "stopping": pb.StoppingOptions(stop_texts=["zz"])}
    submit = await left(rig, "r", [], sampling=pb.SamplingOptions(num_sequences=2), **wishes)
    stopped, other = ids_of("azz"), ids_of("ab")
    records = tuple(TokenLogprobs(submit.key, 0, at, -0.5 * at) for at in range(3))
    records += tuple(TokenLogprobs(submit.key, 1, at, -0.25 * at) for at in range(2))
    batch = FrontendBatch(
        2, keys=pack_u64([submit.key] * 2), sequences=pack_u32([0, 1]), offsets=pack_u32([0, 0]), counts=pack_u32([3, 2]),
        tokens=pack_u32([*stopped, *other]), logprobs=records,
    )  # fmt: skip
    await rig.scheduler.send(batch)
    stop = await rig.scheduler.next(StopAt)
    assert (stop.key, stop.sequence, stop.keep) == (submit.key, 0, 3), "found although nobody reads"
    scheduler = await rig.restart_scheduler()
    await scheduler.next(Ready)
    back, earlier = scheduler.all(Submit)[0], scheduler.all(EarlierLogprobs)[0]
    assert back.history == (pack_u32(stopped), pack_u32(other))
    assert [(record.sequence, record.logprob) for record in earlier.records] == [(r.sequence, r.logprob) for r in records]
    assert scheduler.all(StopAt) == [StopAt(back.key, 0, 3)]


async def test_what_nobody_can_come_back_for_is_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = await left(rig, "r", [7])
    ended = await left(rig, "e", [7])
    await rig.scheduler.finish(finished(ended.key, 1))
    await until(lambda: len(rig.frontend.state.engine._kept) == 1)
    engine = rig.frontend.state.engine
    engine._live[submit.key].kept_until = 0.0
    monkeypatch.setattr(engine._kept, "_clock", lambda: streams.time.monotonic() + 61.0)
    scheduler = await rig.restart_scheduler()
    await scheduler.next(Ready)
    assert scheduler.all(Submit) == scheduler.all(Kept) == [] and not engine._live and not len(engine._kept)


async def test_what_is_kept_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_KEPT", 3)
    for at in range(5):
        call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(request_id=f"r{at % 4}")))
        submit = await rig.scheduler.accept(at + 1)
        await rig.scheduler.tokens(submit.key, 0, [4, 5 + at], finished(submit.key, 2))
        await collect(call)
    await until(lambda: [name for _, name in rig.frontend.state.engine._kept._ended] == ["r2", "r3", "r0"])
    monkeypatch.setattr(keeping, "MAX_KEPT_BYTES", 1)
    call = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(request_id="big")))
    submit = await rig.scheduler.accept(6)
    await rig.scheduler.tokens(submit.key, 0, [4], finished(submit.key, 1))
    await collect(call)
    await until(lambda: not len(rig.frontend.state.engine._kept))
    assert rig.frontend.state.engine._kept._num_bytes == 0
