"""A real front end in this process, over a real gRPC port and a fake scheduler."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontend.fake_scheduler import FakeScheduler
from google.rpc import error_details_pb2, status_pb2

from pagecast.v1 import generation_pb2_grpc
from pagecast_scheduler.frontend import (
    authorizer,
    boundary,
    engine_client,
    generation,
    interceptor,
    main,
    many_requests,
    reloading,
    scheduler_link,
)
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.main import Frontend
from pagecast_wire import log_lines

log_lines.configure("json", "info")

_open: list["Rig"] = []
"""Rigs that nobody has stopped yet. One that were still there at the end would keep the interpreter from ending."""


@dataclass
class Rig:
    """What a test works with."""

    run_dir: Path
    frontend: Frontend
    scheduler: FakeScheduler
    channel: grpc.aio.Channel
    config: FrontendConfig
    is_ended: bool = False

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def restart_scheduler(self) -> FakeScheduler:
        """The scheduler is replaced by one that knows nobody."""
        await self.scheduler.close()
        self.scheduler = FakeScheduler(self.run_dir, "two")
        return self.scheduler


async def start_rig(run_dir: Path, **changes: Any) -> Rig:
    """A serving front end with its scheduler."""
    scheduler = FakeScheduler(run_dir)
    config = FrontendConfig(run_dir=str(run_dir), **{"port": 0, "drain_announce_s": 0.0, **changes})
    frontend = Frontend(config)
    await frontend.start()
    await scheduler.until(lambda: scheduler.hellos)
    async with asyncio.timeout(20):
        while not (run_dir / f"frontend-{config.index}.serving").exists():
            await asyncio.sleep(0.01)
    rig = Rig(run_dir, frontend, scheduler, grpc.aio.insecure_channel(frontend.address), config)
    _open.append(rig)
    return rig


async def end_frontend(rig: Rig) -> None:
    """Stops the front end without a drain, once."""
    if not rig.is_ended:
        rig.is_ended = True
        rig.frontend.end()
        rig.frontend.end()
        await rig.frontend.run_until_stopped()


async def stop_rig(rig: Rig) -> None:
    """Takes everything down."""
    _open.remove(rig)
    await rig.channel.close()
    await end_frontend(rig)
    await rig.scheduler.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="pc") as folder:
        made = await start_rig(Path(folder))
        yield made
        await stop_rig(made)


def details(error: grpc.aio.AioRpcError) -> tuple[status_pb2.Status, dict[str, Any]]:
    """The google.rpc.Status of a failed call, and its details by type name."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    found: dict[str, Any] = {}
    for packed in status.details:
        detail = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])()
        assert packed.Unpack(detail)
        found[type(detail).__name__] = detail
    assert status.code == error.code().value[0]
    return status, found


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    """A folder whose path is short enough for a Unix socket. What a failed test left running in it is stopped."""
    with tempfile.TemporaryDirectory(prefix="pc") as name:
        yield Path(name)
        for rig in [rig for rig in _open if rig.run_dir == Path(name)]:
            await stop_rig(rig)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines that a front end of this process logs, whatever other tests of it have set up for their logs."""
    lines: list[dict[str, Any]] = []

    class Book:
        def note(self, event: str, **fields: Any) -> None:
            lines.append({"event": event, **fields})

        debug = info = warning = error = note

    for module in (authorizer, boundary, engine_client, generation, interceptor, main, many_requests, reloading, scheduler_link):
        monkeypatch.setattr(module, "log", Book())
    return lines


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are taken over when they change are looked at every time."""
    monkeypatch.setattr(reloading, "CHECK_EVERY_S", 0.0)
