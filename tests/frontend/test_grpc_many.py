"""GenerateMany: each request of a call on its own, whatever becomes of the others, and nothing left behind when the call ends."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import finished
from frontend.test_call_memory import left
from frontend.test_grpc_generation import spec
from google.rpc import error_details_pb2, status_pb2

from pagecast import many
from pagecast.errors import InternalError, from_status
from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import main, many_requests
from pagecast_wire.intake import Abort, Rejected, RejectReason, Submit
from pagecast_wire.sampling import FinishReason

ROOT = Path(__file__).parents[2]
METHOD = "/pagecast.v1.GenerationService/GenerateMany"


def tagged(*tags: int, timeout_s: int | None = None, **fields: Any) -> pb.GenerateManyRequest:
    """A message with a request for each tag."""
    requests = [pb.TaggedRequest(tag=tag, spec=spec(**fields)) for tag in tags]
    for request in requests:
        if timeout_s is not None:
            request.timeout.FromSeconds(timeout_s)
            request.timeout.SetInParent()
    return pb.GenerateManyRequest(requests=requests)


async def results(call: Any, count: int) -> dict[int, pb.TaggedResult]:
    """The next so many results, by their tags."""
    found: dict[int, pb.TaggedResult] = {}
    async with asyncio.timeout(30):
        while len(found) < count:
            message = await call.read()
            assert message is not grpc.aio.EOF, f"the call ended with {await call.code()} after {len(found)} results"
            assert message.results and not found.keys() & {each.tag for each in message.results}
            found |= {each.tag: each for each in message.results}
    return found


def reason(result: pb.TaggedResult) -> str:
    """Of a request that failed, in ErrorInfo; its status is that of a call that fails so."""
    status, info = status_pb2.Status.FromString(result.status), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and from_status(result.status).reason == info.reason
    return info.reason


async def finish(rig: Rig, number: int, ids: list[int] | None = None) -> Submit:
    """Accepts and ends the number-th request."""
    submit = await rig.scheduler.accept(number)
    await rig.scheduler.tokens(submit.key, 0, ids or [64 + number], finished(submit.key, len(ids or [1])))
    return submit


async def until_nothing_is_open(rig: Rig) -> None:
    async with asyncio.timeout(20):
        while rig.frontend._engine.calls or any("_end_of" in str(task) for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)


async def test_each_request_has_its_result_when_it_ends(rig: Rig) -> None:
    """In any order; what comes later is begun too, and the end of the caller's side ends the call when all have their results."""
    call = rig.generation.GenerateMany()
    await call.write(tagged(7, 8))
    await finish(rig, 2)
    assert (await results(call, 1))[8].response.sequences[0].token_ids == [66]
    await call.write(tagged(9, timeout_s=1000))
    await call.done_writing()
    third = await finish(rig, 3)
    assert 0 < third.deadline_ms <= 1_000_000
    assert (await results(call, 1))[9].response.sequences[0].token_ids == [67]
    await finish(rig, 1)
    last = (await results(call, 1))[7].response
    assert last.sequences[0].token_ids == [65] and last.request_id and last.usage.output_tokens == 1
    assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK
    assert len({submit.identity.request_id for submit in rig.scheduler.all(Submit)}) == 3
    await until_nothing_is_open(rig)


async def test_what_fails_fails_alone(rig: Rig) -> None:
    """A field, a timeout, an id that is in use, a full queue, a fault: each in its own result, named as a call of its own would."""
    call = rig.generation.GenerateMany()
    await call.write(tagged(1, sampling=pb.SamplingOptions(temperature=-1.0)))
    await call.write(tagged(2, timeout_s=0))
    await call.write(pb.GenerateManyRequest(requests=[pb.TaggedRequest(tag=3)]))
    told = await results(call, 3)
    assert {tag: reason(each) for tag, each in told.items()} == dict.fromkeys((1, 2, 3), "FIELD_VIOLATION")
    assert from_status(told[1].status).violations[0].field == "spec.sampling.temperature"
    assert from_status(told[2].status).violations[0].field == "timeout"

    await call.write(tagged(4, 5, 6, request_id="mine"))
    rejected = [await rig.scheduler.next(Submit, number) for number in (1, 2, 3)]
    await rig.scheduler.reject(Rejected(rejected[0].key, RejectReason.OVERLOADED, retry_after_ms=70))
    await rig.scheduler.reject(Rejected(rejected[1].key, RejectReason.REQUEST_ID_IN_USE))
    await rig.scheduler.accept(3)
    await rig.scheduler.finish(finished(rejected[2].key, 0, FinishReason.NUMERIC_FAULT))
    told = await results(call, 3)
    assert {tag: reason(each) for tag, each in told.items()} == {4: "OVERLOADED", 5: "REQUEST_ID_IN_USE", 6: "NUMERIC_FAULT"}
    assert from_status(told[4].status).retry_after == 0.07

    await call.write(tagged(7))
    await finish(rig, 4)
    assert (await results(call, 1))[7].HasField("response")
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK


async def test_a_defect_met_by_one_request_is_told_without_words_of_it(rig: Rig, monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    call = rig.generation.GenerateMany()
    monkeypatch.setattr(rig.frontend._engine, "open", lambda *_: 1 / 0)
    await call.write(tagged(1))
    broken = (await results(call, 1))[1]
    assert reason(broken) == "BUG" and "division" not in str(broken)
    assert any("unexpected error" in line["event"] for line in logged)
    assert [line["reason"] for line in logged if line["event"] == "request failed"] == ["BUG"]
    monkeypatch.undo()
    await call.write(tagged(2))
    await finish(rig, 1)
    assert (await results(call, 1))[2].HasField("response")
    call.cancel()


async def test_the_callers_end_is_that_of_all_its_requests(rig: Rig) -> None:
    """Of one that waits, one that runs and one of which the scheduler has not heard yet; each is aborted once."""
    call = rig.generation.GenerateMany()
    await call.write(tagged(1, 2))
    running = await rig.scheduler.accept(1)
    await rig.scheduler.tokens(running.key, 0, [65, 66])
    waiting = await rig.scheduler.next(Submit, 2)
    call.cancel()
    await rig.scheduler.until(lambda: len(rig.scheduler.aborted()) >= 2)
    await until_nothing_is_open(rig)
    assert sorted(rig.scheduler.aborted()) == sorted([running.key, waiting.key])


async def test_a_deadline_of_the_call_ends_its_requests_and_one_of_a_request_ends_that(rig: Rig) -> None:
    call = rig.generation.GenerateMany(timeout=5.0)
    await call.write(tagged(1, timeout_s=3000))
    first = await rig.scheduler.next(Submit)
    assert first.deadline_ms <= 5000
    await rig.scheduler.accept(1)
    await rig.scheduler.finish(finished(first.key, 0, FinishReason.DEADLINE_EXCEEDED))
    assert reason((await results(call, 1))[1]) == "DEADLINE_PASSED"
    await call.write(tagged(2))
    second = await rig.scheduler.accept(2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.scheduler.until(lambda: second.key in rig.scheduler.aborted())
    await until_nothing_is_open(rig)


async def test_what_is_wrong_with_the_call_ends_the_call(rig: Rig) -> None:
    """A message that is none, or too large, takes with it what was under way."""
    garbage = rig.channel.stream_stream(METHOD, response_deserializer=pb.GenerateManyResponse.FromString)()
    await garbage.write(tagged(1).SerializeToString())
    submit = await rig.scheduler.accept(1)
    await garbage.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await garbage.read()
    assert details(caught.value)[1]["ErrorInfo"].reason == "MALFORMED_REQUEST"
    await rig.scheduler.until(lambda: submit.key in rig.scheduler.aborted())
    await until_nothing_is_open(rig)


@pytest.mark.parametrize("packed", [b"", b"\xff", status_pb2.Status(code=999).SerializeToString()])
def test_a_status_that_tells_of_no_failure_is_one_of_the_servers(packed: bytes) -> None:
    error = from_status(packed)
    assert isinstance(error, InternalError) and error.code == "UNKNOWN" and "cannot be read" in str(error)


async def test_no_more_are_read_than_may_be_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_requests, "MOST_OPEN", 5)
    call = rig.generation.GenerateMany()
    await call.write(tagged(*range(8)))
    await rig.scheduler.next(Submit, 5)
    await asyncio.sleep(0.2)
    assert len(rig.scheduler.all(Submit)) == 5
    await finish(rig, 1)
    await finish(rig, 2)
    await rig.scheduler.next(Submit, 7)
    await asyncio.sleep(0.2)
    assert len(rig.scheduler.all(Submit)) == 7
    for number in range(3, 9):
        await finish(rig, number)
    assert len(await results(call, 8)) == 8
    call.cancel()


async def test_results_that_are_ready_together_share_messages_of_a_bounded_size(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are turns for; less where they are large, one alone where it is too large for any."""
    monkeypatch.setattr(many_requests, "TURNS", 4)
    monkeypatch.setattr(many_requests, "MOST_BYTES", 3000)
    call = rig.generation.GenerateMany()
    await call.write(tagged(*range(20), stopping=pb.StoppingOptions(max_output_tokens=200)))
    submits = [await rig.scheduler.accept(number) for number in range(1, 21)]
    lengths = [1] * 16 + [150, 150, 2000, 150]
    ends = tuple(finished(submit.key, length) for submit, length in zip(submits, lengths))
    for submit, length in zip(submits, lengths):
        await rig.scheduler.tokens(submit.key, 0, [300 + number % 100 for number in range(length)])
    await asyncio.sleep(0.2)
    from pagecast_wire.intake import FrontendBatch

    await rig.scheduler.send(FrontendBatch(3, finished=ends))
    seen: list[pb.GenerateManyResponse] = []
    while sum(len(message.results) for message in seen) < 20:
        async with asyncio.timeout(30):
            seen.append(await call.read())
    assert sorted(each.tag for message in seen for each in message.results) == list(range(20))
    assert max(len(message.results) for message in seen) in (2, 3, 4)
    assert all(message.ByteSize() <= 3100 or len(message.results) == 1 for message in seen)
    assert any(message.ByteSize() > 3100 for message in seen)
    call.cancel()


async def test_a_reader_that_takes_nothing_loses_its_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_requests, "REPRIEVE_S", 0.2)
    rig = await start_rig(folder, slow_consumer_timeout_s=0.5)
    call = rig.channel.stream_stream(METHOD)()
    number = 0
    while not rig.scheduler.all(Abort) and number < 400:
        number += 2
        await call.write(tagged(number, number + 1, stopping=pb.StoppingOptions(max_output_tokens=200)).SerializeToString())
        await rig.scheduler.until(lambda n=number: rig.scheduler.all(Abort) or len(rig.scheduler.all(Submit)) >= n)
        if not rig.scheduler.all(Abort):
            submit = await rig.scheduler.accept(number - 1)
            await rig.scheduler.tokens(submit.key, 0, [300] * 40_000, finished(submit.key, 40_000))
    await rig.scheduler.next(Abort)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            while True:
                await call.read()
    assert details(caught.value)[1]["ErrorInfo"].reason == "SLOW_CONSUMER"
    await until_nothing_is_open(rig)
    await stop_rig(rig)


async def test_a_drain_lets_a_call_end_and_takes_no_more(folder: Path) -> None:
    rig = await start_rig(folder, drain_timeout_s=30.0)
    call = rig.generation.GenerateMany()
    await call.write(tagged(1))
    submit = await rig.scheduler.accept(1)
    rig.frontend.end()
    rig.is_ended = True
    stopping = asyncio.create_task(rig.frontend.run_until_stopped())
    async with asyncio.timeout(20):
        while not rig.frontend.state.is_draining:
            await asyncio.sleep(0.01)
    await call.write(tagged(2))
    assert reason((await results(call, 1))[2]) == "DRAINING"
    await rig.scheduler.tokens(submit.key, 0, [65], finished(submit.key, 1))
    assert (await results(call, 1))[1].HasField("response")
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK
    async with asyncio.timeout(20):
        await stopping
    await stop_rig(rig)


async def test_a_drain_that_lasts_too_long_says_so_of_each_request(folder: Path) -> None:
    rig = await start_rig(folder, drain_timeout_s=0.5)
    call = rig.generation.GenerateMany()
    await call.write(tagged(1, 2))
    await rig.scheduler.accept(1)
    await rig.scheduler.accept(2)
    rig.frontend.end()
    rig.is_ended = True
    stopping = asyncio.create_task(rig.frontend.run_until_stopped())
    assert {reason(each) for each in (await results(call, 2)).values()} == {"DRAIN_TIMEOUT"}
    await call.done_writing()
    async with asyncio.timeout(20):
        await stopping
    await stop_rig(rig)


async def test_a_call_with_nothing_under_way_ends_with_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a status that says to ask elsewhere, and without being waited for."""
    monkeypatch.setattr(main, "CLOSING_S", 60.0)
    rig = await start_rig(folder)
    call = rig.generation.GenerateMany()
    await call.write(tagged(1))
    await finish(rig, 1)
    assert (await results(call, 1))[1].HasField("response")
    rig.frontend.end()
    rig.is_ended = True
    async with asyncio.timeout(30):
        await rig.frontend.run_until_stopped()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert details(caught.value)[1]["ErrorInfo"].reason == "DRAINING"
    await stop_rig(rig)


def test_client_and_server_know_the_same_limit() -> None:
    assert many.MOST_OPEN == many_requests.MOST_OPEN
    assert f"At most {many.MOST_OPEN} are open" in (ROOT / "protos/pagecast/v1/generation.proto").read_text()


async def test_a_replaced_scheduler_gets_the_requests_of_a_call_again(rig: Rig) -> None:
    call = rig.generation.GenerateMany()
    await call.write(tagged(1))
    submit = await rig.scheduler.accept(1)
    await rig.scheduler.tokens(submit.key, 0, [65, 66])
    await asyncio.sleep(0.1)
    second = await rig.restart_scheduler()
    again = await second.next(Submit)
    assert again.identity.request_id == submit.identity.request_id
    await second.accept(1)
    await second.tokens(again.key, 2, [67], finished(again.key, 3))
    assert (await results(call, 1))[1].response.sequences[0].token_ids == [65, 66, 67]
    call.cancel()


@pytest.mark.parametrize("how", ["refused", "rejected", "finished", "cancelled"])
async def test_requests_go_with_their_results(rig: Rig, how: str) -> None:
    """While the call is still open, but where it is its end that ends them. Nothing waits for the collector."""
    gc.collect()
    gc.disable()
    try:
        others = len([*left(), *kept()])
        call = rig.channel.stream_stream(METHOD, response_deserializer=pb.GenerateManyResponse.FromString)()
        temperature = -1.0 if how == "refused" else 1.0
        await call.write(tagged(1, 2, sampling=pb.SamplingOptions(temperature=temperature)).SerializeToString())
        for number in (1, 2) if how != "refused" else ():
            submit = await rig.scheduler.accept(number)
            if how == "finished":
                await rig.scheduler.tokens(submit.key, 0, [65], finished(submit.key, 1))
            elif how == "rejected":
                await rig.scheduler.reject(Rejected(submit.key, RejectReason.OVERLOADED, retry_after_ms=5))
        if how == "cancelled":
            call.cancel()
        else:
            assert len(await results(call, 2)) == 2
        await until_nothing_is_open(rig)
        await asyncio.sleep(0.1)
        found = [*left(), *kept()]
        assert len(found) == others
        del found
        call.cancel()
    finally:
        gc.enable()


def kept() -> Iterable[Any]:
    return [each for each in gc.get_objects() if isinstance(each, pb.TaggedRequest | pb.GenerateManyRequest)]


def resident_mib() -> int:
    return psutil.Process().memory_info().rss >> 20


async def test_a_slow_request_does_not_keep_what_came_with_it(rig: Rig) -> None:
    """Forty messages, each with a request that goes on and six megabytes that are refused."""
    call = rig.generation.GenerateMany()
    before = resident_mib()
    for number in range(0, 80, 2):
        message = tagged(number)
        message.requests.add(tag=number + 1).spec.prompt_text = "x" * 6_000_000
        await call.write(message)
        assert reason((await results(call, 1))[number + 1]) in ("PROMPT_TOO_LONG", "FIELD_VIOLATION")
    await rig.scheduler.next(Submit, 40)
    assert resident_mib() - before < 160
    call.cancel()


async def test_two_calls_of_one_connection_do_not_meet(rig: Rig) -> None:
    async def one(tag: int) -> AsyncIterator[pb.GenerateManyRequest]:
        yield tagged(tag)

    calls = [rig.generation.GenerateMany(one(tag)) for tag in (1, 2)]
    for number in (1, 2):
        await finish(rig, number)
    for tag, call in zip((1, 2), calls):
        async with asyncio.timeout(20):
            assert [each.tag async for message in call for each in message.results] == [tag]
