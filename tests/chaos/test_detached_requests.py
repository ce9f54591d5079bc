"""Nobody reads, and the scheduler is killed: whoever comes back finds every token, through any front end."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import pytest
from chaos.detached_client import VOCAB, Caller
from e2e.cli_server import LIMIT_S, Served, serve
from e2e.test_grpc_continuation import second_frontend

from pagecast.v1 import generation_pb2 as pb

LENGTH = 1200
ORACLE = ("--executor", "oracle", "--oracle-vocab-size", str(VOCAB), "--max-model-len", "4096", "--num-blocks", "1024")


@dataclass
class Cluster:
    """first, second: connections to its two front ends."""

    served: Served
    first: grpc.aio.Channel
    second: grpc.aio.Channel

    def kill_scheduler(self) -> None:
        process = self.served.children()["scheduler"][0]
        process.kill()
        process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[Served, str]]:
    with serve(*ORACLE, "--oracle-step-us", "2000", "--max-num-seqs", "6") as running, second_frontend(running) as (_, other):
        yield running, other


@pytest.fixture
async def cluster(addresses: tuple[Served, str]) -> AsyncIterator[Cluster]:
    served, other = addresses
    async with grpc.aio.insecure_channel(served.address) as first, grpc.aio.insecure_channel(other) as second:
        yield Cluster(served, first, second)


async def test_what_runs_waits_or_has_ended_survives_the_scheduler_without_a_reader(cluster: Cluster) -> None:
    """Kept by the front end that began it: decoding, n = 2, with log-probabilities, still queued, and ended without or with its reader."""
    wishes = {"output": pb.OutputOptions(token_ids=True, logprobs=pb.LogprobsOptions())}
    plain = Caller("plain", [1] * 70, LENGTH).begin(cluster.first)
    two = Caller("two", [2] * 9, LENGTH, num_sequences=2).begin(cluster.first)
    logged = Caller("logged", [3] * 9, LENGTH, options=wishes).begin(cluster.first)
    short = Caller("short", [4] * 9, 60).begin(cluster.first)
    read = Caller("read", [5] * 9, 30).begin(cluster.first, detach=False)
    for caller in (plain, two, logged, short):
        await caller.read(at_least=10)
    await read.read()
    fill = [Caller(f"fill-{i}", [6 + i] * 9, LENGTH).begin(cluster.second) for i in range(6)]
    queued = Caller("queued", [20] * 9, 50).begin(cluster.first)
    response = await queued.call.read()
    assert response.event.WhichOneof("event") == "accepted"
    for caller in (plain, two, logged, short, queued):
        await caller.leave()
    gone = Caller("short", short.prompt, 60, got={0: list(short.got[0])})
    assert (await (await gone.come_back(cluster.second)).read()).is_complete  # it ended without its first reader
    cluster.kill_scheduler()
    read.got[0] = read.got[0][:7]  # what it had really got when its connection broke
    read.is_complete = False
    for caller in (plain, two, logged, short, queued, read):
        await (await caller.come_back(cluster.second)).read()
        caller.check()
    assert len(logged.logprobs) == LENGTH and all(value == value for value in logged.logprobs), "none is NaN"
    for caller in fill:
        (await caller.read()).check()


@pytest.mark.chaos
async def test_each_further_death_finds_it_with_all_who_have_read_it(cluster: Cluster) -> None:
    caller = Caller("again", [9] * 40, LENGTH).begin(cluster.first)
    await (await caller.read(at_least=10)).leave()
    for channel in (cluster.second, cluster.first, cluster.second):
        cluster.kill_scheduler()
        await caller.come_back(channel)
        await (await caller.read(at_least=len(caller.got[0]) + 20)).leave()
    await (await caller.come_back(cluster.first)).read()
    caller.check()
