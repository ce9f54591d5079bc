"""The engine as a front end sees it: its requests there, the way of every batch to its streams, questions and their answers.

Owns the keys and the table of live requests; the socket is the link's. After the welcome of a scheduler that did not know us (it was
restarted) every live request is submitted again with the tokens received so far, then `Ready`.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from pagecast_scheduler.frontend.cache_watch import CacheWatch
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.keeping import Keeping
from pagecast_scheduler.frontend.quotas import Quotas
from pagecast_scheduler.frontend.scheduler_link import TICK_S, SchedulerLink
from pagecast_scheduler.frontend.streams import RequestStream
from pagecast_wire import view_u32, view_u64
from pagecast_wire.control import (
    Attach,
    Attached,
    AuditReport,
    CacheEvents,
    CancelReport,
    Done,
    Leave,
    LogLevelSet,
    NotNow,
    RequestList,
    UnwatchCache,
    WorkersEnded,
)
from pagecast_wire.intake import (
    KEY_BITS,
    Abort,
    EngineStatus,
    FrontendBatch,
    FrontendRefused,
    FrontendWelcome,
    Ready,
    Rejected,
    RejectReason,
    ServingState,
    Submit,
)

log = structlog.get_logger("pagecast.frontend")

ANSWER_S = 10.0
"""The scheduler answers a question between two steps; after so long it counts as busy with something worse."""
LOST_AFTER_S = 60.0
"""Open streams wait so long for a scheduler to come back."""


class EngineClient:
    """All methods run on the event loop that `start` was called on."""

    def __init__(self, address: str, slow_consumer_timeout_s: float) -> None:
        self.welcome: FrontendWelcome | None = None
        self.status: EngineStatus | None = None
        self.refused: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.link = SchedulerLink(address, self._handle)
        self.calls: dict[RequestStream, None] = {}  # every call being answered
        self.rebuild: Callable[[RequestStream, Attached], None] = lambda stream, attached: None  # shows a stream what it joined
        self._slow_consumer_timeout_s = slow_consumer_timeout_s
        self._live: dict[int, RequestStream] = {}  # requests that the scheduler has, by key; of calls, and of some that are over
        self._kept = Keeping()
        self._watches: dict[int, CacheWatch] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._tickets = 0
        self._next = 0
        self._quotas = Quotas()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler has been heard lately."""
        return self.welcome is not None and self.link.is_heard

    @property
    def state(self) -> ServingState:
        """State of the engine as far as this process can tell."""
        if self.welcome is None or self.status is None:
            return ServingState.STARTING
        return self.status.state if self.is_connected else ServingState.RECOVERING

    def start(self) -> None:
        """Dials in; must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.link.start()
        self._tick()

    def close(self) -> None:
        """Leaves the scheduler, which cancels what is still open."""
        if self._timer is not None:
            self._timer.cancel()
        self.link.close()

    def open(self, stream: RequestStream, opening: Submit | Attach) -> None:
        """Gives the request its key and sends `opening`, a Submit or an Attach. Raises Refusal when there is no scheduler to take it."""
        request = stream.request
        num_output = 0 if isinstance(opening, Attach) else opening.stop.max_output_tokens * len(stream.sequences)
        stream.lease = self._quotas.admit(request.principal, stream, request.num_prompt_tokens, num_output)
        stream.key = self._new_key()
        try:
            self._send_now(msgspec.structs.replace(opening, key=stream.key))
        except Refusal:
            stream.lease.end(0)
            raise
        self._live[stream.key] = stream
        self.calls[stream] = None

    def _send_now(self, message: msgspec.Struct) -> None:
        """Sends what only a scheduler that is there now may get. Raises Refusal."""
        if self.welcome is None:
            raise Refusal(Reason.STARTING)
        if not self.is_connected or not self.link.has_room:
            raise Refusal(Reason.RECOVERING)
        self.link.send(message)

    def finish(self, stream: RequestStream) -> None:
        """The call is over, however it ended: one word to the scheduler, unless that has ended the request."""
        self.calls.pop(stream, None)
        if self._live.pop(stream.key, None) is None:
            stream.settle()
            self._keep(stream)
            return
        keys, grace_ms = (stream.key,), stream.leave_grace_ms
        kept = stream.without_caller(time.monotonic() + grace_ms / 1000) if grace_ms and stream.request.submit.identity.keep else None
        if kept is None:
            stream.settle()
        else:
            self._live[kept.key] = kept
        self.link.send(Leave(keys, grace_ms, keeps=kept is not None) if grace_ms else Abort(keys))

    def _keep(self, stream: RequestStream) -> None:
        """This request is over; late readers may come when there is another scheduler."""
        if self.welcome is not None:
            self._kept.add(stream, self.welcome.limits.retention_ms / 1000)

    async def ask(self, question: msgspec.Struct) -> Any:
        """The scheduler's answer to a question, whose ticket is given here. Raises Refusal when there is none to be had."""
        self._tickets += 1
        ticket = self._tickets
        answer = self._questions[ticket] = self._loop.create_future()
        try:
            self._send_now(msgspec.structs.replace(question, ticket=ticket))
            async with asyncio.timeout(ANSWER_S):
                told = await answer
        except TimeoutError:
            raise Refusal(Reason.RECOVERING) from None
        finally:
            del self._questions[ticket]
        if isinstance(told, NotNow):
            raise Refusal(Reason.STARTING)
        return told

    def watch_cache(self, instance: str, after: int) -> CacheWatch:
        """Begins to watch the prefix cache, after a change of an instance that is known or from a snapshot. Raises Refusal."""
        self._tickets += 1
        watch = CacheWatch(self._tickets, instance, after)
        self._send_now(watch.opening())
        self._watches[watch.ticket] = watch
        return watch

    def end_watch(self, watch: CacheWatch) -> None:
        """Nobody reads this watch any more."""
        if self._watches.pop(watch.ticket, None) is not None:
            self.link.send(UnwatchCache(watch.ticket))

    def fail_all(self, reason: Reason) -> None:
        """Ends every open call."""
        for stream in list(self.calls):
            stream.fail(Refusal(reason))

    def _new_key(self) -> int:
        self._next += 1
        return self.link.slot << KEY_BITS | self._next

    def _handle(self, message: Any) -> None:
        match message:
            case FrontendBatch():
                self._on_batch(message)
            case EngineStatus():
                self.status = message
                self.on_change()
            case FrontendWelcome():
                self._on_welcome(message)
            case Attached():
                self._on_attached(message)
            case CancelReport() | RequestList() | Done() | WorkersEnded() | LogLevelSet() | AuditReport() | NotNow():
                self._on_answer(message)
            case CacheEvents():
                watch = self._watches.get(message.ticket)
                if watch is not None and self.welcome is not None:
                    watch.receive(message, self.welcome.scheduler_incarnation)
            case FrontendRefused():
                self.refused = message.reason
                self.on_change()

    def _on_answer(self, answer: Any) -> None:
        waiting = self._questions.get(answer.ticket)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _on_attached(self, attached: Attached) -> None:
        stream = self._live.get(attached.submit.key)
        if stream is None:
            return
        try:
            self.rebuild(stream, attached)
        except Exception:
            self._on_bug(stream)
        if stream.is_over:
            self._end(stream)

    def _end(self, stream: RequestStream) -> None:
        """The scheduler has nothing more to say of this request."""
        del self._live[stream.key]
        if stream.kept_until is not None:
            stream.settle()
            self._keep(stream)

    def _on_batch(self, batch: FrontendBatch) -> None:
        live = self._live
        for accepted in batch.accepted:
            if (stream := live.get(accepted.key)) is not None:
                stream.on_accepted(accepted.queue_position)
        for rejected in batch.rejected:
            self._on_rejected(rejected)
        for record in batch.logprobs:
            if (stream := live.get(record.key)) is not None:
                self._safely(stream, stream.on_logprobs, record)
        for part in batch.prompt_logprobs:
            if (stream := live.get(part.key)) is not None:
                self._safely(stream, stream.on_prompt_logprobs, part)
        if batch.keys:
            self._on_tokens(batch)
        for progress in batch.progress:
            if (stream := live.get(progress.key)) is not None:
                stream.on_progress(progress)
        for finished in batch.finished:
            if (stream := live.get(finished.key)) is not None:
                stream.on_finished(finished)
                if stream.is_over:
                    self._end(stream)

    def _on_rejected(self, rejected: Rejected) -> None:
        """A refusal ends the request; that of a key that is taken says nothing about the request that has it."""
        if rejected.reason is not RejectReason.DUPLICATE_KEY and (stream := self._live.pop(rejected.key, None)) is not None:
            stream.on_rejected(rejected)
            if stream.kept_until is not None:
                stream.settle()

    def _on_tokens(self, batch: FrontendBatch) -> None:
        """The token columns: one dictionary look-up and one packed append per sequence and step."""
        live = self._live
        tokens = memoryview(batch.tokens)
        columns = (view_u64(batch.keys).tolist(), *(view_u32(c).tolist() for c in (batch.sequences, batch.offsets, batch.counts)))
        start = 0
        for key, sequence, offset, count in zip(*columns):
            end = start + 4 * count
            stream = live.get(key)
            if stream is not None:
                self._safely(stream, stream.on_tokens, sequence, offset, tokens[start:end])
            start = end

    def _safely(self, stream: RequestStream, take: Callable[..., None], *news: Any) -> None:
        """Hands news to a stream."""
        try:
            take(*news)
        except Exception:
            self._on_bug(stream)

    def _on_bug(self, stream: RequestStream) -> None:
        """One stream's trouble must not touch the others of the batch."""
        error_id = secrets.token_hex(8)
        log.error("stream failed", request_id=stream.request.request_id, error_id=error_id, exc_info=True)
        stream.fail(Refusal(Reason.BUG, message=f"internal error {error_id}", metadata={"error_id": error_id}))

    def _on_welcome(self, welcome: FrontendWelcome) -> None:
        """News about the model and its limits; or, after a hello, a scheduler that must be told of everything that is open."""
        self.welcome = welcome
        if self.link.is_introducing:
            self._resubmit(welcome)
        self.on_change()

    def _resubmit(self, welcome: FrontendWelcome) -> None:
        is_new_slot = welcome.slot != self.link.slot
        self.link.join(welcome.slot)
        for answer in self._questions.values():  # what one scheduler was asked another does not know
            if not answer.done():
                answer.set_exception(Refusal(Reason.RECOVERING))
        streams = list(self._live.values())
        self._live.clear()
        now = time.monotonic()
        for stream in streams:
            if is_new_slot:
                stream.key = self._new_key()
            messages = stream.resubmission(now)
            if messages:
                self._live[stream.key] = stream
            else:
                if stream.kept_until is not None:
                    stream.settle()
                self._keep(stream)
            for message in messages:
                self.link.send(message)
        for kept in self._kept.messages(self._new_key):
            self.link.send(kept)
        for watch in self._watches.values():
            self.link.send(watch.opening())
        self.link.send(Ready())
        log.info("scheduler joined", slot=welcome.slot, scheduler=welcome.scheduler_incarnation, resubmitted=len(self._live))

    def _tick(self) -> None:
        """Four times a second: the link's own, quiet streams, stuck readers, a scheduler that has gone silent."""
        now = time.monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        stopped_s = self.link.tick(now)
        if stopped_s:
            for stream in self.calls:
                stream.forgive(stopped_s, now)
        is_stalled = self.welcome is not None and (not self.is_connected or self.state is ServingState.STALLED)
        for stream in list(self.calls):
            stream.watch(now, self._slow_consumer_timeout_s, is_stalled)
        if self.welcome is not None and self.link.silent_s > LOST_AFTER_S:
            self.fail_all(Reason.SCHEDULER_LOST)
        self.on_change()
