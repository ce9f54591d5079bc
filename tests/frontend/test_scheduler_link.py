"""The front end's socket: what is said in a burst leaves together, and nothing that was said is kept at the end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pagecast_scheduler.frontend import scheduler_link
from pagecast_scheduler.frontend.scheduler_link import SchedulerLink
from pagecast_wire import decode
from pagecast_wire.intake import Abort, Farewell, FrontendHello

Link = tuple[SchedulerLink, Any]


@pytest.fixture
async def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Link]:
    """A link that has said hello, with a burst so long that a slow machine makes no two of it; and the socket that it speaks to."""
    monkeypatch.setattr(scheduler_link, "GATHER_S", 0.5)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    address = f"ipc://{tmp_path}/frontends.ipc"
    router.bind(address)
    made = SchedulerLink(address, lambda message: None)
    made.start()
    async with asyncio.timeout(20):
        while not made.has_dialled:
            made.tick(0.0)
            await asyncio.sleep(0.01)
    assert isinstance((await heard(router))[0], FrontendHello)
    yield made, router
    if not made._socket.closed:
        made.close()
    router.close(0)
    context.term()


async def heard(router: Any) -> list[Any]:
    """The messages that came as one; pings apart."""
    async with asyncio.timeout(20):
        while True:
            _, *parts = await router.recv_multipart()
            found = [decode(part, "from_frontend") for part in parts]
            if type(found[0]).__name__ != "FrontendPing":
                return found


async def test_a_burst_leaves_together_behind_its_first_message(link: Link) -> None:
    made, router = link
    for number in range(5):
        made.send(Abort((number,)))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await heard(router) == [Abort((0,))], "the first waits for nobody"
    assert await heard(router) == [Abort((number,)) for number in range(1, 5)]


async def test_nothing_is_kept_at_the_end(link: Link) -> None:
    made, router = link
    made.send(Abort((0,)))
    assert await heard(router) == [Abort((0,))]
    made.send(Abort((1,)))
    made.close()
    assert await heard(router) == [Abort((1,)), Farewell()]


async def test_what_a_tick_sent_is_not_sent_again(link: Link) -> None:
    made, router = link
    made.send(Abort((0,)))
    assert await heard(router) == [Abort((0,))]
    made.send(Abort((1,)))
    made.tick(0.0)
    made.send(Abort((2,)))
    assert await heard(router) == [Abort((1,))]
    assert await heard(router) == [Abort((2,))]
    made.close()
    assert await heard(router) == [Farewell()]
