"""Stock clients of gRPC against two replicas: weights by load, retries with the published service config, health checks of their own."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from free_ports import free_port
from frontend.conftest import Rig, start_rig, stop_rig
from frontend.fake_scheduler import FakeScheduler, finished
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast import AsyncClient, SamplingParams, channel
from pagecast.cluster import hold_port
from pagecast.errors import StartError
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, runtime_pb2, runtime_pb2_grpc
from pagecast_scheduler.frontend.config import FrontendConfig, shows_services
from pagecast_wire.intake import EngineStatus, Rejected, RejectReason, ServingState, Submit


@pytest.fixture
async def replicas() -> AsyncIterator[list[Rig]]:
    with tempfile.TemporaryDirectory(prefix="pc") as first, tempfile.TemporaryDirectory(prefix="pc") as second:
        rigs = [await start_rig(Path(folder)) for folder in (first, second)]
        yield rigs
        for rig in rigs:
            await stop_rig(rig)


def target(replicas: list[Rig]) -> str:
    return "ipv4:" + ",".join(rig.frontend.address for rig in replicas)


async def serve_all(scheduler: FakeScheduler) -> None:
    """Answers every request with one token, for ever."""
    count = 0
    while True:
        count += 1
        submit = await scheduler.accept(count)
        await scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))


async def test_the_loaded_replica_gets_fewer_calls(replicas: list[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own weighted round robin, by the load reports in the trailers."""
    async def busy(scheduler: FakeScheduler = replicas[0].scheduler) -> None:
        await scheduler.send(EngineStatus(ServingState.SERVING, 1, 1, num_blocks=16, num_running=8, num_blocks_referenced=16))

    monkeypatch.setattr(replicas[0].scheduler, "send_status", busy)
    await busy()
    service = [asyncio.create_task(serve_all(rig.scheduler)) for rig in replicas]
    config = {"loadBalancingConfig": [{"weighted_round_robin": {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}}]}
    options = [("grpc.service_config", json.dumps(config)), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target(replicas), options=options) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        request = pb.GenerateRequest(spec=pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5])))

        async def counts(calls: int) -> list[int]:
            before = [len(rig.scheduler.all(Submit)) for rig in replicas]
            for _ in range(calls):
                await stub.Generate(request)
            return [len(rig.scheduler.all(Submit)) - start for rig, start in zip(replicas, before)]

        async with asyncio.timeout(60):
            while True:
                loaded, idle = await counts(40)
                if idle > 1.5 * loaded:  # four times the weight, once the first reports have counted
                    break
    for task in service:
        task.cancel()


async def test_a_stock_client_retries_overload_with_the_published_config(replicas: list[Rig]) -> None:
    rig = replicas[0]
    config = {key: value for key, value in channel.SERVICE_CONFIG.items() if key != "healthCheckConfig"}
    async with grpc.aio.insecure_channel(rig.frontend.address, options=[("grpc.service_config", json.dumps(config))]) as stock:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(stock)
        call = stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5]))))
        first = await rig.scheduler.next(Submit)
        began = asyncio.get_running_loop().time()
        await rig.scheduler.reject(Rejected(first.key, RejectReason.OVERLOADED, retry_after_ms=300))
        second = await rig.scheduler.accept(2)
        assert asyncio.get_running_loop().time() - began >= 0.28  # the pushback is obeyed
        await rig.scheduler.tokens(second.key, 0, [1], finished(second.key, 1))
        assert (await call).usage.output_tokens == 1


async def test_our_client_turns_to_the_healthy_replica(replicas: list[Rig]) -> None:
    service = [asyncio.create_task(serve_all(rig.scheduler)) for rig in replicas]
    await replicas[0].scheduler.set_state(ServingState.STALLED)
    check, answer = health_pb2_grpc.HealthStub(replicas[0].channel).Check, None
    async with asyncio.timeout(60):
        while answer != health_pb2.HealthCheckResponse.NOT_SERVING:
            answer = (await check(health_pb2.HealthCheckRequest())).status
    async with AsyncClient([rig.frontend.address for rig in replicas]) as client:
        for _ in range(6):
            assert len((await client.generate([5], SamplingParams(max_tokens=1))).token_ids) == 1
    assert (len(replicas[0].scheduler.all(Submit)), len(replicas[1].scheduler.all(Submit))) == (0, 6)
    async with AsyncClient(replicas[0].frontend.address) as client:  # alone it can still be asked what ails it
        assert await client.health() == "NOT_SERVING" and (await client.load()).state == "stalled"
    for task in service:
        task.cancel()


async def test_reflection_is_off_where_it_is_not_wanted() -> None:
    with tempfile.TemporaryDirectory(prefix="pc") as folder:
        rig = await start_rig(Path(folder), reflection=False)
        call: Any = rig.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await runtime_pb2_grpc.RuntimeServiceStub(rig.channel).GetLoad(runtime_pb2.GetLoadRequest())
        await stop_rig(rig)


@pytest.mark.parametrize(
    ("host", "wish", "shown"),
    [("127.0.0.1", None, True), ("::1", None, True), ("0.0.0.0", None, False), ("0.0.0.0", True, True), ("127.0.0.1", False, False)],
)
def test_reflection_is_for_this_machine_unless_it_is_asked_for(host: str, wish: bool | None, shown: bool) -> None:
    assert shows_services(FrontendConfig("/run/x", host=host, reflection=wish)) is shown


def test_an_address_that_processes_share_belongs_to_one_cluster() -> None:
    port = free_port()
    with hold_port("127.0.0.1", port), pytest.raises(StartError, match="another cluster has it"):
        hold_port("127.0.0.1", port)
    hold_port("127.0.0.1", port).close()
