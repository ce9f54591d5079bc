"""Nobody reads, and the scheduler is killed: whoever comes back finds every token, through any front end."""

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from chaos.cluster import Cluster, cluster
from chaos.detached_client import Caller

from pagecast.v1 import generation_pb2 as pb

LENGTH = 900


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("--oracle-step-us", "2000", "--max-num-seqs", "6") as made:
        yield made


@pytest.fixture
async def channels(running: Cluster) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Channel]]:
    async with running.channels() as pair:
        yield pair


async def test_what_runs_waits_or_has_ended_survives_the_scheduler_without_a_reader(
    running: Cluster, channels: tuple[grpc.aio.Channel, grpc.aio.Channel]
) -> None:
    """Kept by the front end that began it: decoding, n = 2, with log-probabilities, still queued, and ended without or with its reader."""
    first, second = channels
    wishes = {"output": pb.OutputOptions(token_ids=True, logprobs=pb.LogprobsOptions())}
    plain = Caller("plain", [1] * 70, LENGTH).begin(first)
    two = Caller("two", [2] * 9, LENGTH, num_sequences=2).begin(first)
    logged = Caller("logged", [3] * 9, LENGTH, options=wishes).begin(first)
    short = Caller("short", [4] * 9, 60).begin(first)
    read = Caller("read", [5] * 9, 30).begin(first, detach=False)
    for caller in (plain, two, logged, short):
        await caller.read(at_least=10)
    await read.read()
    fill = [Caller(f"fill-{i}", [6 + i] * 9, LENGTH).begin(second) for i in range(6)]
    queued = Caller("queued", [20] * 9, 50).begin(first)
    response = await queued.call.read()
    assert response.event.WhichOneof("event") == "accepted"
    for caller in (plain, two, logged, short, queued):
        await caller.leave()
    gone = Caller("short", short.prompt, 60, got={0: list(short.got[0])})
    assert (await (await gone.come_back(second)).read()).is_complete  # it ended without its first reader
    running.kill("scheduler")
    read.got[0] = read.got[0][:7]  # what it had really got when its connection broke
    read.is_complete = False
    for caller in (plain, two, logged, short, queued, read):
        await (await caller.come_back(second)).read()
        caller.check()
    assert len(logged.logprobs) == LENGTH and all(value == value for value in logged.logprobs), "none is NaN"
    for caller in fill:
        (await caller.read()).check()


@pytest.mark.chaos
async def test_each_further_death_finds_it_with_all_who_have_read_it(
    running: Cluster, channels: tuple[grpc.aio.Channel, grpc.aio.Channel]
) -> None:
    first, second = channels
    caller = Caller("again", [9] * 40, LENGTH).begin(first)
    await (await caller.read(at_least=10)).leave()
    for channel in (second, first, second):
        running.kill("scheduler")
        await caller.come_back(channel)
        await (await caller.read(at_least=len(caller.got[0]) + 20)).leave()
    await (await caller.come_back(first)).read()
    caller.check()
