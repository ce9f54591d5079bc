"""A scheduler for front end tests: a ROUTER that speaks pagecast_wire and does exactly what a test says."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from pagecast_wire import WIRE_DIGEST, WIRE_VERSION, decode, encode, pack_u32, pack_u64, view_u32
from pagecast_wire.control import Attach, Attached, Audit, CacheEvents, ListRequests, NotNow, ResetPrefixCache, SetDrain, WatchCache
from pagecast_wire.intake import (
    Abort,
    Accepted,
    EngineLimits,
    EngineStatus,
    Finished,
    FrontendBatch,
    FrontendHello,
    FrontendPing,
    FrontendWelcome,
    HelloWanted,
    ModelFacts,
    Progress,
    Ready,
    Rejected,
    ServingState,
    Submit,
    Usage,
)
from pagecast_wire.sampling import FinishReason

MODEL = ModelFacts("tiny", "oracle", "d1" * 32, 512, 256, (2,), "float32", 1, 1, 8, 64, 1000)
LIMITS = EngineLimits(16, 17, 256, 8, 64, 16, 4096, True, 60_000, 30_000)
T = TypeVar("T")
PATIENCE_S = 60.0


class FakeScheduler:
    """Answers hellos; records everything else in `received`. The test drives it with `accept`, `tokens`, `finish` ..."""

    def __init__(self, run_dir: Path, incarnation: str = "one", *, model: ModelFacts = MODEL, limits: EngineLimits = LIMITS) -> None:
        self.received: list[Any] = []
        self.state = ServingState.SERVING
        self.incarnation = incarnation
        self.identity: bytes | None = None
        self.hellos: list[FrontendHello] = []
        self._model, self._limits = model, limits
        self._news = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{run_dir}/frontends.ipc")
        self._task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            for data in parts:
                await self._take(identity, decode(data, "from_frontend"))
            self._news.set()

    async def _take(self, identity: bytes, message: Any) -> None:
        if isinstance(message, FrontendHello):
            assert (message.wire_version, message.wire_digest) == (WIRE_VERSION, WIRE_DIGEST)
            self.identity = identity
            self.hellos.append(message)
            slot = message.slot if message.slot > 0 else 1
            await self.send(FrontendWelcome(slot, self.incarnation, self._model, self._limits))
            await self.send_status()
        elif self.identity != identity:
            await self._socket.send_multipart([identity, encode(HelloWanted(self.incarnation))])
        elif isinstance(message, FrontendPing):
            await self.send_status()
        elif isinstance(message, Audit | ListRequests | ResetPrefixCache | SetDrain):
            await self.send(NotNow(message.ticket))
        elif isinstance(message, WatchCache):
            await self.send(CacheEvents(message.ticket, 1, 0, is_snapshot=True))
        else:
            self.received.append(message)

    async def send(self, message: msgspec.Struct) -> None:
        assert self.identity is not None
        await self._socket.send_multipart([self.identity, encode(message)])

    async def send_status(self) -> None:
        await self.send(EngineStatus(self.state, 1, 1, num_blocks=16, num_running=1, num_blocks_referenced=4))

    async def set_state(self, state: ServingState) -> None:
        self.state = state
        await self.send_status()

    async def until(self, find: Callable[[], T | None]) -> T:
        """The first true value of `find`, asked again after every message that arrives."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = find()
                if found:
                    return found
                self._news.clear()
                await self._news.wait()

    async def next(self, kind: type[T], count: int = 1) -> T:
        """The count-th message of a kind, as soon as it is there."""
        return await self.until(lambda: next(iter(self.all(kind)[count - 1 :]), None))

    def all(self, kind: type[T]) -> list[T]:
        return [m for m in self.received if isinstance(m, kind)]

    def aborted(self) -> list[int]:
        return [key for message in self.all(Abort) for key in message.keys]

    async def accept(self, count: int = 1) -> Submit:
        """Accepts the count-th submit."""
        submit = await self.next(Submit, count)
        await self.send(FrontendBatch(1, accepted=(Accepted(submit.key, 3),)))
        return submit

    async def attach(self, attach: Attach | Submit, to: Submit, history: list[int], *ended: Finished) -> None:
        """The request that `to` submitted, with this output so far, gets one more reader."""
        submit = msgspec.structs.replace(to, key=attach.key, history=(pack_u32(history),))
        await self.send(Attached(submit, 3, 2000, tuple(msgspec.structs.replace(end, key=attach.key) for end in ended)))

    async def reject(self, rejected: Rejected) -> None:
        await self.send(FrontendBatch(1, rejected=(rejected,)))

    async def tokens(self, key: int, offset: int, ids: list[int], finished: Finished | None = None) -> None:
        await self.send(
            FrontendBatch(
                2,
                keys=pack_u64([key]),
                sequences=pack_u32([0]),
                offsets=pack_u32([offset]),
                counts=pack_u32([len(ids)]),
                tokens=pack_u32(ids),
                finished=() if finished is None else (finished,),
            )
        )

    async def progress(self, progress: Progress) -> None:
        await self.send(FrontendBatch(2, progress=(progress,)))

    async def finish(self, finished: Finished) -> None:
        await self.send(FrontendBatch(3, finished=(finished,)))

    async def close(self) -> None:
        self._task.cancel()
        self._socket.close(0)
        self._context.term()


def usage(output_tokens: int, prompt_tokens: int = 3) -> Usage:
    return Usage(prompt_tokens, 1, output_tokens, 0, 1000, 2000, 3000, 0, 0)


def finished(key: int, output_tokens: int, reason: FinishReason = FinishReason.LENGTH, stop_token_id: int = -1) -> Finished:
    return Finished(key, 0, reason, usage(output_tokens), stop_token_id)


def history(submit: Submit) -> list[int]:
    return [int(i) for column in submit.history for i in view_u32(column)]


def prompt(submit: Submit) -> list[int]:
    return list(struct.unpack(f"<{len(submit.prompt) // 4}I", submit.prompt))


__all__ = ["LIMITS", "MODEL", "FakeScheduler", "Ready", "finished", "history", "prompt", "usage"]
