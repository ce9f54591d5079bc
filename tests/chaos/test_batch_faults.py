"""A list of class BATCH while one process after the other is killed: every request of it ends, with exactly its tokens."""

import asyncio
import time
from random import Random
from typing import Any

import grpc
import pytest
from chaos.cluster import cluster
from chaos.detached_client import Caller
from e2e.cli_server import LIMIT_S

from pagecast.v1 import admin_pb2 as admin
from pagecast.v1 import admin_pb2_grpc
from pagecast.v1 import generation_pb2 as pb

pytestmark = pytest.mark.chaos
BATCH = {"scheduling": pb.SchedulingOptions(priority=pb.PRIORITY_BATCH)}
NUM_REQUESTS = 60
LONGEST = 400


def callers() -> list[Caller]:
    """Prompts and outputs of many lengths, none of which shares a block with another."""
    random = Random(3)
    outputs = [LONGEST, *(random.randint(2, LONGEST - 20) for _ in range(NUM_REQUESTS - 1))]
    prompts = [[number + 1, *(random.randrange(1, 2000) for _ in range(random.randint(20, 300)))] for number in range(NUM_REQUESTS)]
    return [Caller(f"batch-{i}", prompts[i], outputs[i], seed=i, options=BATCH) for i in range(NUM_REQUESTS)]


async def causes(operator: Any) -> list[int]:
    """Of all open requests, why each waits; 0: it runs. Empty while no scheduler answers."""
    try:
        page = await operator.ListRequests(admin.ListRequestsRequest(page_size=NUM_REQUESTS), timeout=10)
    except grpc.aio.AioRpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), error
        return []
    return [info.waiting.cause for info in page.requests]


async def until_more(listed: list[Caller], tokens: int, operator: Any) -> None:
    """They have so many tokens more than now, and the scheduler knows all that are not done, of which there are some: one that dies before
    it was told of a request, and then the front end that would have told it, are two deaths."""
    before, end = _tokens(listed), time.monotonic() + LIMIT_S
    while True:
        known = len(await causes(operator))
        num_open = sum(not caller.is_complete for caller in listed)
        if _tokens(listed) >= before + tokens and known >= num_open:
            break
        assert time.monotonic() < end, "nothing moves"
        await asyncio.sleep(0.02)
    assert num_open, "the list ended before the fault"


def _tokens(listed: list[Caller]) -> int:
    return sum(len(ids) for caller in listed for ids in caller.got.values())


@pytest.mark.parametrize(("rows", "step_us"), [(64, 10_000), (8, 4000)])
async def test_a_list_outlives_every_process(rows: int, step_us: int) -> None:
    """With rows for all, so that prompts are put off to be just in time, and with rows for a few, so that most wait."""
    sizes = ("--max-num-seqs", str(rows), "--max-num-batched-tokens", "512", "--num-blocks", "8192", "--oracle-step-us", str(step_us))
    with cluster(*sizes) as running:
        async with running.channels() as (first, second), grpc.aio.insecure_channel(f"unix:{running.run_dir}/admin-1.sock") as channel:
            operator = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            listed = callers()
            for number, caller in enumerate(listed):
                caller.begin(second if number % 2 else first)
            for caller in listed:
                await caller.accepted()
            found = await causes(operator)
            assert found.count(0) < NUM_REQUESTS, "some wait"
            async with asyncio.TaskGroup() as readers:
                for caller in listed:
                    readers.create_task(caller.finish(second))
                for role in ("scheduler", "worker", "scheduler", "frontend"):
                    running.kill(role)
                    await until_more(listed, 500, operator)
            for caller in listed:
                caller.check()
            await running.wait_idle()
