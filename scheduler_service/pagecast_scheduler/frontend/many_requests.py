"""GenerateMany: the requests of one call, each on its own, and their results in messages of those that are ready together.

A request goes the way of a Generate call, as a task of its own. What it ends with, an answer or a status, is its result; only what is wrong
with the call itself ends the call, and all its requests.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import call_context
from pagecast_scheduler.frontend.boundary import settled
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.errors import Reason, Refusal, field_violation

log = structlog.get_logger("pagecast.frontend")

METHOD = "/pagecast.v1.GenerationService/GenerateMany"
MOST_OPEN = 512
"""Requests of a call that have been read and whose results are not written. Says the public proto."""
MOST_BYTES = 1 << 20
"""Of results in a message, but for one that is larger by itself: clients take 4 MiB where nobody has told them otherwise."""
TOGETHER = 8
"""Requests begun before others of this process have a turn, and the first of them are sent."""
TAG_BYTES = 32
"""At most what a result takes in a message beside its answer or status."""
TURNS = 32
"""Answers finished before those are written: of a list whose outputs end in one step the reader gets the first while the last are made."""
REPRIEVE_S = 1.0
"""After the time for a write: a process that was stopped meanwhile first learns what its reader has taken."""

Turn = Callable[[], Awaitable[None]]
Whole = Callable[[Any, float | None, None, Turn], Awaitable[pb.GenerateResponse]]
"""From a spec, the seconds it has and no context to an answer, which is finished when it has its turn. Raises Refusal."""


class ManyRequests:
    """One call. whole: answers one request. ending: set when a call that has nothing under way is to end, as the server does."""

    def __init__(self, whole: Whole, time_left_s: float | None, context: Any, config: FrontendConfig, ending: asyncio.Event) -> None:
        self._whole, self._context, self._ending = whole, context, ending
        self._write_timeout_s, self._most_bytes = config.slow_consumer_timeout_s, min(MOST_BYTES, config.max_message_bytes)
        self._deadline = None if time_left_s is None else time.monotonic() + time_left_s
        self._call = call_context.current()
        self._open: set[asyncio.Task[None]] = set()
        self._ready: deque[tuple[int, pb.GenerateResponse | bytes, int]] = deque()  # tag, answer or status, bytes of a message
        self._num_being_written = 0
        self._news = asyncio.Event()  # results, or the end of the caller's side or the server
        self._room = asyncio.Event()
        self._fault: BaseException | None = None
        self._turns = TURNS
        self._in_line: deque[asyncio.Future[None]] = deque()

    async def answer(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Until every request has its result. Raises Refusal for what is wrong with the call."""
        reading, ending = asyncio.create_task(self._read(requests)), asyncio.create_task(self._ending.wait())
        for task in (reading, ending):
            task.add_done_callback(lambda _: self._news.set())
        try:
            while not reading.done() or self._open or self._ready:
                await self._news.wait()
                self._news.clear()
                if reading.done():
                    reading.result()
                if self._fault is not None:
                    raise self._fault
                while self._ready:
                    message = self._taken()
                    self._give_turns()
                    await self._write(message)
                    self._num_being_written = 0
                    self._room.set()
                if ending.done() and not reading.done() and not self._open:
                    raise Refusal(Reason.DRAINING)
        finally:
            tasks = (reading, ending, *self._open)
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        async for message in requests:
            for number, part in enumerate(message.requests, 1):
                while len(self._open) + len(self._ready) + self._num_being_written >= MOST_OPEN:
                    self._room.clear()
                    await self._room.wait()
                # A copy, as a part of a message keeps all of it, and this request may outlast the others by far.
                request = pb.TaggedRequest()
                request.CopyFrom(part)
                task = asyncio.create_task(self._end_of(request))
                self._open.add(task)
                task.add_done_callback(self._note_end)
                del part, request, task
                if number % TOGETHER == 0:
                    await asyncio.sleep(0)
            del message

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
        self._news.set()

    async def _end_of(self, request: pb.TaggedRequest) -> None:
        call = dataclasses.replace(self._call, request_id="", labels=())
        call_context.enter(call)
        try:
            answer = await settled(METHOD, self._answered(request))
        except asyncio.CancelledError:
            return  # by this call's end; the task would keep the error, and with it the request
        if isinstance(answer, Refusal):
            answer.__traceback__ = answer.__context__ = None  # would hold the request until the collector comes by
            # The call's own line, metric and span know nothing of it.
            log.info(
                "request failed", method=METHOD, reason=answer.reason.name, principal=call.principal.name or None,
                request_id=call.request_id or None, trace_id=call.trace.trace_id, labels=dict(call.labels) or None,
            )  # fmt: skip
            status = answer.status().SerializeToString()
            self._ready.append((request.tag, status, len(status) + TAG_BYTES))
        else:
            self._ready.append((request.tag, answer, answer.ByteSize() + TAG_BYTES))
        self._news.set()

    async def _answered(self, request: pb.TaggedRequest) -> pb.GenerateResponse:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if request.HasField("timeout"):
            timeout_s = request.timeout.seconds + request.timeout.nanos / 1e9
            if timeout_s <= 0:
                raise field_violation("timeout", f"must be more than 0 seconds, not {timeout_s:g}")
            left = timeout_s if left is None else min(left, timeout_s)
        return await self._whole(request.spec, left, None, self._turn)

    async def _turn(self) -> None:
        if not self._turns:
            self._in_line.append(asyncio.get_running_loop().create_future())
            return await self._in_line[-1]
        self._turns -= 1

    def _give_turns(self) -> None:
        self._turns = TURNS
        while self._turns and self._in_line:
            first = self._in_line.popleft()
            if not first.done():  # its request was cancelled
                first.set_result(None)
                self._turns -= 1

    def _taken(self) -> pb.GenerateManyResponse:
        """Results for one message."""
        message, size, taken = pb.GenerateManyResponse(), 0, 0
        while self._ready and (not taken or size + self._ready[0][2] <= self._most_bytes):
            tag, answer, num_bytes = self._ready.popleft()
            if isinstance(answer, bytes):
                message.results.add(tag=tag, status=answer)
            else:
                message.results.add(tag=tag).response.CopyFrom(answer)
            size, taken = size + num_bytes, taken + 1
        self._num_being_written = taken
        return message

    async def _write(self, message: pb.GenerateManyResponse) -> None:
        """Raises Refusal where the reader takes nothing for too long."""
        writing = asyncio.ensure_future(self._context.write(message))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody asks for once the call has ended
        try:
            for patience in (self._write_timeout_s, REPRIEVE_S):
                if (await asyncio.wait({writing}, timeout=patience))[0]:
                    return writing.result()
            raise Refusal(Reason.SLOW_CONSUMER)
        finally:
            writing.cancel()
