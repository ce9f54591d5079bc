"""What a call leaves behind: its request goes with it, however it ends. Nothing of it waits for the collector, which comes by rarely."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig
from frontend.fake_scheduler import finished
from frontend.test_grpc_generation import spec

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.prepared_request import PreparedRequest
from pagecast_wire.intake import Rejected, RejectReason, Submit

METHOD = "/pagecast.v1.GenerationService/"


@pytest.fixture
def others() -> Iterator[list[Any]]:
    """Those of tests before this one, which may have failed and so have kept theirs."""
    gc.collect()
    gc.disable()
    yield left()
    gc.enable()


def left() -> list[Any]:
    kinds = (pb.GenerateRequest, pb.GenerateStreamRequest, PreparedRequest)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


async def end(rig: Rig, call: Any, how: str) -> None:
    """Brings an open call to its end; one that the server has refused is there already."""
    if how == "refused":
        return
    submit = await rig.scheduler.accept(len(rig.scheduler.all(Submit)) + 1)
    if how == "rejected":
        await rig.scheduler.reject(Rejected(submit.key, RejectReason.OVERLOADED, retry_after_ms=5))
    elif how == "finished":
        await rig.scheduler.tokens(submit.key, 0, [65], finished(submit.key, 1))
    elif how == "cancelled":
        call.cancel()


@pytest.mark.parametrize("how", ["refused", "rejected", "deadline", "cancelled", "finished"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_the_request_goes_with_its_call(rig: Rig, others: list[Any], streaming: bool, how: str) -> None:
    """By bytes, so that the caller, who is in this process too, holds nothing."""
    method = rig.channel.unary_stream(METHOD + "GenerateStream") if streaming else rig.channel.unary_unary(METHOD + "Generate")
    kind = pb.GenerateStreamRequest if streaming else pb.GenerateRequest
    wanted = kind(spec=spec(sampling=pb.SamplingOptions(temperature=-1.0 if how == "refused" else 1.0))).SerializeToString()
    call = method(wanted, timeout=0.2 if how == "deadline" else None)
    await end(rig, call, how)
    try:
        assert [part async for part in call] if streaming else await call
        assert how == "finished"
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        assert how != "finished"
    async with asyncio.timeout(10):
        while rig.frontend._engine.calls:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # the last of gRPC's own turns
    assert len(left()) == len(others)
