"""Pings both ways, frozen peers, the age of connections, and the values that decide it."""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, start_rig, stop_rig
from frontend.fake_scheduler import finished
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mesh.stalling_proxy import StallingProxy

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc
from pagecast_scheduler.frontend import listeners
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.main import Frontend
from pagecast_wire.intake import ServingState

PINGER = [
    ("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]  # fmt: skip
SPEC = pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5, 6, 7]))


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pc") as name:
        yield Path(name)


def stream(channel: grpc.aio.Channel) -> Any:
    return generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=SPEC))


def test_the_transports_values_are_the_published_ones() -> None:
    options = dict(listeners.transport_options(FrontendConfig("/x"), 100))
    expected = {
        "grpc.keepalive_time_ms": 20_000, "grpc.keepalive_timeout_ms": 10_000, "grpc.http2.ping_timeout_ms": 10_000,
        "grpc.http2.min_ping_interval_without_data_ms": 500, "grpc.keepalive_permit_without_calls": 1, "grpc.http2.max_ping_strikes": 2,
        "grpc.so_reuseport": 0, "grpc.max_receive_message_length": 9 << 20, "grpc.max_metadata_size": 16 << 10,
        "grpc.max_allowed_incoming_connections": 100, "grpc.server.max_pending_requests": 20_000,
    }  # fmt: skip
    assert expected.items() <= options.items()
    # No connection is ended for its age, which would end its streams; the misspelt key of others' servers is not there either.
    assert not any("connection_age" in name or "recv_ping" in name for name in options)


async def frozen(rig: Rig, limit_s: float) -> None:
    """A stream behind a proxy that freezes: its request must be given up."""
    async with StallingProxy(rig.frontend.address) as proxy, grpc.aio.insecure_channel(proxy.address, options=PINGER[3:]) as channel:
        call = stream(channel)
        submit = await rig.scheduler.accept(1)
        await call.read()
        proxy.freeze()
        async with asyncio.timeout(limit_s):
            while not rig.scheduler.aborted():
                await asyncio.sleep(0.05)
        assert rig.scheduler.aborted() == [submit.key]
        call.cancel()


async def test_a_peer_whose_kernel_still_answers_is_noticed_by_pings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shorter times than the published ones; those take half a minute, and have a test of their own in `make mesh`."""
    published = listeners.transport_options

    def shorter(config: FrontendConfig, cap: int) -> list[tuple[str, int]]:
        faster = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 4000, "grpc.http2.ping_timeout_ms": 4000}
        return list((dict(published(config, cap)) | faster).items())

    monkeypatch.setattr(listeners, "transport_options", shorter)
    rig = await start_rig(folder)
    await frozen(rig, 60)
    await stop_rig(rig)


@pytest.mark.mesh
async def test_a_frozen_peer_is_given_up_within_the_published_times(folder: Path) -> None:
    rig = await start_rig(folder)
    await frozen(rig, 60)
    await stop_rig(rig)


CLIENT = """
import sys, grpc
from pagecast import Client
stream = iter(Client(sys.argv[1]).stream([5, 6, 7]))
print(type(next(stream)).__name__, flush=True)
for event in stream:
    pass
"""


@pytest.mark.mesh
async def test_a_stopped_client_is_given_up(folder: Path) -> None:
    rig = await start_rig(folder)
    process = subprocess.Popen([sys.executable, "-c", CLIENT, rig.frontend.address], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        submit = await rig.scheduler.accept(1)
        assert await asyncio.to_thread(process.stdout.readline) == "Accepted\n"
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(90):
            while not rig.scheduler.aborted():
                await asyncio.sleep(0.1)
        assert rig.scheduler.aborted() == [submit.key]
    finally:
        process.kill()
        process.wait()
        await stop_rig(rig)


@pytest.mark.mesh
async def test_a_minute_of_pings_and_silence_keeps_stream_and_watch(folder: Path) -> None:
    """Pings every second through a quiet prefill; a health watch beside it sees every change and never ends."""
    rig = await start_rig(folder)
    async with grpc.aio.insecure_channel(rig.frontend.address, options=PINGER) as channel:
        call, watch = stream(channel), health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        submit = await rig.scheduler.accept(1)
        await call.read()
        statuses = [(await watch.read()).status]
        until = time.monotonic() + 60
        for state in (ServingState.STALLED, ServingState.SERVING):
            await asyncio.sleep(5)
            await rig.scheduler.set_state(state)
            statuses.append((await watch.read()).status)
        while time.monotonic() < until:
            await asyncio.sleep(0.5)
            assert not call.done() and not watch.done()
        assert statuses == [1, 2, 1]
        await rig.scheduler.tokens(submit.key, 0, [104], finished(submit.key, 1))
        kinds = []
        while (response := await call.read()) is not grpc.aio.EOF:
            kinds.append(response.event.WhichOneof("event"))
        assert kinds[-1] == "completed"
    await stop_rig(rig)


async def test_fifty_starts_at_once_take_fifty_ports() -> None:
    """Whoever binds chooses: nothing is probed, closed and bound again."""
    with tempfile.TemporaryDirectory(prefix="pc") as name:
        frontends = []
        for number in range(50):
            run_dir = Path(name) / str(number)
            run_dir.mkdir(mode=0o700)
            frontends.append(Frontend(FrontendConfig(run_dir=str(run_dir), port=0, drain_announce_s=0)))
        await asyncio.gather(*(frontend.start() for frontend in frontends))
        published = [(Path(name) / str(number) / "frontend-0.address").read_text().strip() for number in range(50)]
        assert len(set(published)) == 50 and published == [frontend.address for frontend in frontends]
        for frontend in frontends:
            frontend.end()
            frontend.end()
        await asyncio.gather(*(frontend.run_until_stopped() for frontend in frontends))
