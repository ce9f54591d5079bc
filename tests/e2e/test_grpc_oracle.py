"""All processes, over gRPC, with the oracle: every token can be known beforehand, whatever happens around it."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from e2e.cli_server import Served, serve
from google.rpc import error_details_pb2, status_pb2

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, runtime_pb2, runtime_pb2_grpc
from pagecast_scheduler.frontend.tokenizer import ByteTokenizer
from pagecast_worker.oracle import oracle_tokens

VOCAB = 2048
ORACLE = ("--executor", "oracle", "--oracle-vocab-size", str(VOCAB), "--drain-announce-s", "0")
TEXT = ByteTokenizer(VOCAB)
PATIENCE_S = 120


@dataclass
class Call:
    """One request, and all that came of it."""

    prompt: list[int]
    num_tokens: int
    seed: int
    ids: list[int]
    text: str
    end: Any = None
    usage: Any = None

    def expected(self, **rules: Any) -> list[int]:
        return oracle_tokens(self.prompt, self.num_tokens, self.seed, vocab_size=VOCAB, **rules)


def spec(call: Call, **stopping: Any) -> pb.GenerationSpec:
    rules = {"max_output_tokens": call.num_tokens, "ignore_eos": True, **stopping}
    return pb.GenerationSpec(
        prompt_token_ids=pb.TokenIds(ids=call.prompt), sampling=pb.SamplingOptions(seed=call.seed), stopping=pb.StoppingOptions(**rules)
    )


def new_call(rng: random.Random, num_prompt: int, num_tokens: int) -> Call:
    return Call([rng.randrange(VOCAB) for _ in range(num_prompt)], num_tokens, rng.getrandbits(64), [], "")


class Cluster:
    """Stubs of a running cluster."""

    def __init__(self, served: Served, channel: grpc.aio.Channel) -> None:
        self.served = served
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._runtime: Any = runtime_pb2_grpc.RuntimeServiceStub(channel)

    async def load(self) -> runtime_pb2.GetLoadResponse:
        return await self._runtime.GetLoad(runtime_pb2.GetLoadRequest())

    async def until_idle(self) -> runtime_pb2.GetLoadResponse:
        """No request, and no block held by one, as of a moment after work was done (the load is as old as the last status)."""
        async with asyncio.timeout(PATIENCE_S):
            while (load := await self.load()).output_tokens <= 1 or load.num_running or load.num_waiting or load.num_blocks_referenced:
                await asyncio.sleep(0.05)
        return load

    async def until_running(self) -> None:
        """The load shows that something runs."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self.load()).num_running:
                await asyncio.sleep(0.05)

    async def until_longer(self, call: Call, length: int) -> None:
        """More than so many tokens of a stream have come."""
        async with asyncio.timeout(PATIENCE_S):
            while len(call.ids) <= length:
                await asyncio.sleep(0.01)

    async def stream(self, call: Call, **stopping: Any) -> Call:
        """Reads a whole stream, checking the order of its events and every offset."""
        kinds = []
        async for response in self.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(call, **stopping)), timeout=PATIENCE_S):
            event = response.event
            kinds.append(event.WhichOneof("event"))
            assert event.seq == len(kinds)
            if kinds[-1] == "tokens":
                assert event.tokens.first_token_offset == len(call.ids)
                call.ids += event.tokens.token_ids
                call.text += event.tokens.text
            elif kinds[-1] == "sequence_finished":
                call.end = event.sequence_finished
            elif kinds[-1] == "completed":
                call.usage = event.completed.usage
        assert kinds[0] == "accepted" and kinds[-2:] == ["sequence_finished", "completed"]
        assert [kinds.count(k) for k in ("accepted", "sequence_finished", "completed")] == [1, 1, 1]
        return call

    async def whole(self, call: Call, **stopping: Any) -> Call:
        """The same by Generate."""
        answer = await self.generation.Generate(pb.GenerateRequest(spec=spec(call, **stopping)), timeout=PATIENCE_S)
        (call.end,) = answer.sequences
        call.ids, call.text, call.usage = list(call.end.token_ids), call.end.text, answer.usage
        return call


@asynccontextmanager
async def cluster(*words: str) -> AsyncIterator[Cluster]:
    with serve(*ORACLE, *words) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            yield Cluster(served, channel)


def error_info(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Details of a failed call by type name."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    found = {}
    for packed in status.details:
        detail = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])()
        packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


async def test_many_requests_at_once_get_the_oracles_tokens_and_text() -> None:
    rng = random.Random(1)
    async with cluster("--max-num-seqs", "24", "--max-num-batched-tokens", "64") as c:
        calls = [new_call(rng, rng.choice([1, 15, 16, 17, 90]), rng.choice([1, 2, 33, 80])) for _ in range(80)]
        await asyncio.gather(*(c.stream(call) if i % 2 else c.whole(call) for i, call in enumerate(calls)))
        for call in calls:
            assert call.ids == call.expected()
            assert call.text == TEXT.decode(call.ids)
            assert call.end.reason == pb.FINISH_REASON_LENGTH and call.usage.output_tokens == call.num_tokens
        await c.until_idle()


async def test_a_pool_too_small_for_all_changes_no_token() -> None:
    rng = random.Random(2)
    async with cluster("--num-blocks", "25", "--max-model-len", "256") as c:
        calls = [new_call(rng, rng.randrange(1, 60), 100) for _ in range(12)]
        await asyncio.gather(*(c.stream(call) for call in calls))
        assert all(call.ids == call.expected() for call in calls)
        assert (await c.until_idle()).num_preemptions > 0


async def test_a_shared_beginning_is_reused_and_reported() -> None:
    rng = random.Random(3)
    async with cluster() as c:
        first = new_call(rng, 100, 8)
        second = Call([*first.prompt[:64], *range(30)], 8, 5, [], "")
        await c.stream(first)
        await c.stream(second)
        assert (first.ids, second.ids) == (first.expected(), second.expected())
        assert first.usage.cached_prompt_tokens == 0 and second.usage.cached_prompt_tokens == 64


async def test_token_stops_end_a_sequence_where_they_must() -> None:
    rng = random.Random(4)
    async with cluster() as c:
        for minimum in (0, 30):
            free = new_call(rng, 10, 60)
            stop = free.expected()[20]
            call = Call(free.prompt, 60, free.seed, [], "")
            await c.stream(call, stop_token_ids=[stop], min_output_tokens=minimum)
            assert call.ids == call.expected(stop_ids={stop}, min_tokens=minimum)
            if not minimum:
                assert call.end.reason == pb.FINISH_REASON_STOP and call.end.stop_token_id == stop and call.ids[-1] == stop


@pytest.mark.parametrize("streaming", [True, False])
async def test_text_stops_end_a_sequence_before_their_first_character(streaming: bool) -> None:
    rng = random.Random(5)
    async with cluster() as c:
        for _ in range(6):
            call = new_call(rng, 10, 200)
            text = TEXT.decode(call.expected())
            at = rng.randrange(20, 100)
            stop = text[at : at + 3]
            await (c.stream(call, stop_texts=[stop]) if streaming else c.whole(call, stop_texts=[stop]))
            assert call.text == text[: text.index(stop)]
            assert call.end.reason == pb.FINISH_REASON_STOP and call.end.stop_text == stop
            assert call.ids == call.expected()[: len(call.ids)] and call.usage.output_tokens == len(call.ids) < 200
            assert stop in TEXT.decode(call.ids) and stop not in TEXT.decode(call.ids[:-1])
        await c.until_idle()


BAD = {
    "spec.input": pb.GenerationSpec(),
    "spec.prompt_text": pb.GenerationSpec(prompt_text=""),
    "spec.prompt_token_ids.ids[0]": pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[VOCAB])),
    "spec.prompt_token_ids": pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[1] * 9000)),
    "spec.sampling.temperature": pb.GenerationSpec(prompt_text="x", sampling=pb.SamplingOptions(temperature=float("nan"))),
    "spec.sampling.top_p": pb.GenerationSpec(prompt_text="x", sampling=pb.SamplingOptions(top_p=float("inf"))),
    "spec.stopping.max_output_tokens": pb.GenerationSpec(prompt_text="x", stopping=pb.StoppingOptions(max_output_tokens=8192)),
    "spec.stopping.stop_token_ids[0]": pb.GenerationSpec(prompt_text="x", stopping=pb.StoppingOptions(stop_token_ids=[1 << 31])),
}


async def test_bad_requests_are_refused_by_field_while_a_canary_goes_on() -> None:
    rng = random.Random(6)
    async with cluster("--oracle-step-us", "2000") as c:
        canary = new_call(rng, 20, 8000)  # for longer than anything here can take
        singing = asyncio.create_task(c.stream(canary))
        await c.until_longer(canary, 0)
        for field, bad in BAD.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await c.generation.Generate(pb.GenerateRequest(spec=bad))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in error_info(caught.value)["BadRequest"].field_violations] == [field]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.generation.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(model="other", prompt_text="x")))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert not singing.done()
        await c.until_longer(canary, len(canary.ids))
        singing.cancel()
        assert canary.ids == canary.expected()[: len(canary.ids)]
        await c.until_idle()


def long_call(rng: random.Random) -> Call:
    """One that could end at any token, so that nobody can know beforehand that it will not, but does not for long."""
    while True:
        call = new_call(rng, 50, 6000)
        if len(oracle_tokens(call.prompt, 3000, call.seed, vocab_size=VOCAB, stop_ids={0})) == 3000:
            return call


async def test_cancels_and_deadlines_free_every_block() -> None:
    rng = random.Random(7)
    async with cluster("--oracle-step-us", "2000") as c:
        requests = [pb.GenerateStreamRequest(spec=spec(long_call(rng), ignore_eos=False)) for _ in range(6)]
        streams = [c.generation.GenerateStream(request, timeout=None if i % 2 else 5.0) for i, request in enumerate(requests)]
        for stream in streams[1::2]:
            while (await stream.read()).event.WhichOneof("event") != "tokens":
                pass
        await c.until_running()
        for stream in streams[1::2]:
            stream.cancel()
        for stream in streams[0::2]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await c.until_idle()


async def test_a_deadline_that_cannot_be_met_is_refused_before_the_work() -> None:
    rng = random.Random(10)
    async with cluster("--oracle-step-us", "10000") as c:
        await c.whole(new_call(rng, 10, 50))  # from this the scheduler learns how long a step takes
        call = new_call(rng, 10, 8000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.generation.Generate(pb.GenerateRequest(spec=spec(call)), timeout=20.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error_info(caught.value)["ErrorInfo"].reason == "DEADLINE_UNREACHABLE"


async def test_a_full_queue_refuses_with_advice_and_serves_the_others() -> None:
    rng = random.Random(8)
    async with cluster("--max-num-seqs", "1", "--max-queued-requests", "2", "--oracle-step-us", "2000") as c:
        calls = [new_call(rng, 5, 300) for _ in range(12)]
        results = await asyncio.gather(*(c.stream(call) for call in calls), return_exceptions=True)
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert refused and len(refused) < len(calls)
        for error in refused:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            details = error_info(error)
            assert details["ErrorInfo"].reason == "OVERLOADED" and details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        assert all(r.ids == r.expected() for r in results if isinstance(r, Call))


@pytest.mark.parametrize("role", ["scheduler", "worker"])
async def test_a_stream_outlives_the_death_of_a_process(role: str) -> None:
    rng = random.Random(9)
    async with cluster("--oracle-step-us", "3000") as c:
        calls = [new_call(rng, 30, 500) for _ in range(4)]
        tasks = [asyncio.create_task(c.stream(call)) for call in calls]
        async with asyncio.timeout(PATIENCE_S):
            while not all(len(call.ids) > 20 for call in calls):
                await asyncio.sleep(0.01)
        c.served.children()[role][0].send_signal(signal.SIGKILL)
        await asyncio.gather(*tasks)
        for call in calls:
            assert call.ids == call.expected() and call.text == TEXT.decode(call.ids)
        await c.until_idle()
