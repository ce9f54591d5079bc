"""The front end's one link to the scheduler: a DEALER socket, the hello, and the way of every batch to its streams.

Owns the slot, the keys and the table of live requests. A scheduler that does not know us (it was restarted) asks for a new hello;
after its welcome every live request is submitted again with the tokens received so far, then `Ready`. Nothing is sent while no
scheduler is connected, so nothing stale can arrive at a new one.
"""

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec
import structlog
import zmq

from pagecast_scheduler.frontend.cache_watch import CacheWatch
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.keeping import Keeping
from pagecast_scheduler.frontend.quotas import Quotas
from pagecast_scheduler.frontend.streams import RequestStream
from pagecast_wire import WIRE_DIGEST, WIRE_VERSION, WireError, decode, encode, view_u32, view_u64
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
from pagecast_wire.host import pid_namespace
from pagecast_wire.intake import (
    KEY_BITS,
    Abort,
    EngineStatus,
    Farewell,
    FrontendBatch,
    FrontendHello,
    FrontendPing,
    FrontendRefused,
    FrontendWelcome,
    HelloWanted,
    Ready,
    RejectReason,
    ServingState,
    Submit,
)

log = structlog.get_logger("pagecast.frontend")

TICK_S = 0.25
STOPPED_AFTER_S = 1.0
"""A tick that comes so late shows that this process was stopped; what waited for it meanwhile is not to blame."""
PING_S = 1.0
SILENT_AFTER_S = 5.0
"""The scheduler sends a status at least every second; after so long without any it counts as lost."""
ANSWER_S = 10.0
"""The scheduler answers a question between two steps; after so long it counts as busy with something worse."""
LOST_AFTER_S = 60.0
"""Open streams wait so long for a scheduler to come back."""
FAREWELL_MS = 500
"""How long the last words may take on their way to a scheduler that is there; one that is not gets none."""
MAX_PARTS = 256
"""Messages to the scheduler that leave as one."""
MAX_READS = 64
"""Messages taken from the socket before other work gets its turn."""


class EngineClient:
    """See the module. All methods run on the event loop that `start` was called on."""

    def __init__(self, address: str, slow_consumer_timeout_s: float) -> None:
        self.welcome: FrontendWelcome | None = None
        self.status: EngineStatus | None = None
        self.refused: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.calls: dict[RequestStream, None] = {}  # every call being answered
        self.rebuild: Callable[[RequestStream, Attached], None] = lambda stream, attached: None  # shows a stream what it joined
        self._address = address
        self._slow_consumer_timeout_s = slow_consumer_timeout_s
        self._live: dict[int, RequestStream] = {}  # requests that the scheduler has, by key; of calls, and of some that are over
        self._kept = Keeping()
        self._incarnation = secrets.token_hex(8)
        self._watches: dict[int, CacheWatch] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._tickets = 0
        self._next = 0
        self._slot = -1
        self._hello_due = True
        self._is_introducing = False
        self._last_heard = float("-inf")
        self._last_ping = float("-inf")
        self._last_tick = float("inf")
        self._outbox: deque[bytes] = deque()
        self._is_flush_due = False
        self._quotas = Quotas()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the scheduler has been heard lately."""
        return self.welcome is not None and time.monotonic() - self._last_heard < SILENT_AFTER_S

    @property
    def has_dialled(self) -> bool:
        """Whether a scheduler takes what is sent."""
        return not self._hello_due

    @property
    def state(self) -> ServingState:
        """State of the engine as far as this process can tell."""
        if self.welcome is None or self.status is None:
            return ServingState.STARTING
        return self.status.state if self.is_connected else ServingState.RECOVERING

    def start(self) -> None:
        """Dials in; must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.SNDHWM, 100_000), (zmq.RCVHWM, 100_000)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.IDENTITY, f"frontend-{self._incarnation}".encode())
        self._socket.connect(self._address)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._tick()

    def close(self) -> None:
        """Leaves the scheduler, and says so; it cancels what is still open."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self.send(Farewell())
        self._flush()
        self._socket.close(FAREWELL_MS)
        self._context.term()

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
        if not self.is_connected or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            raise Refusal(Reason.RECOVERING)
        self.send(message)

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
        self.send(Leave(keys, grace_ms, keeps=kept is not None) if grace_ms else Abort(keys))

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
            self.send(UnwatchCache(watch.ticket))

    def send(self, message: msgspec.Struct) -> None:
        """Sends, together with what else is said in this turn of the loop; keeps it for later while the scheduler is slow. While it is
        gone a resubmission will say it instead."""
        self._outbox.append(encode(message))
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def fail_all(self, reason: Reason) -> None:
        """Ends every open call."""
        for stream in list(self.calls):
            stream.fail(Refusal(reason))

    def _new_key(self) -> int:
        self._next += 1
        return self._slot << KEY_BITS | self._next

    def _read_soon(self) -> None:
        """After a send the socket's descriptor may not signal what has arrived meanwhile; look for it."""
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(MAX_READS):
            if self._socket.closed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                message = decode(self._socket.recv(zmq.NOBLOCK), "to_frontend")
            except WireError as error:
                log.error("message from the scheduler refused", detail=str(error))
                continue
            self._last_heard = time.monotonic()
            self._handle(message)
        self._loop.call_soon(self._read)

    def _handle(self, message: Any) -> None:
        match message:
            case FrontendBatch():
                self._on_batch(message)
            case EngineStatus():
                self.status = message
                self.on_change()
            case FrontendWelcome():
                self._on_welcome(message)
            case HelloWanted():
                self._hello_due = True
                self._hello()
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
            if rejected.reason is not RejectReason.DUPLICATE_KEY and (stream := live.pop(rejected.key, None)) is not None:
                stream.on_rejected(rejected)
                if stream.kept_until is not None:
                    stream.settle()
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

    def _hello(self) -> None:
        """Introduces this process, if a hello is due and somebody is there to hear it."""
        namespace = pid_namespace()
        hello = FrontendHello(WIRE_VERSION, WIRE_DIGEST, self._incarnation, os.getpid(), namespace, self._slot)
        try:
            self._socket.send(encode(hello), zmq.NOBLOCK)
        except zmq.Again:
            return
        self._hello_due = False
        self._is_introducing = True
        self._read_soon()

    def _on_welcome(self, welcome: FrontendWelcome) -> None:
        """News about the model and its limits; or, after a hello, a scheduler that must be told of everything that is open."""
        self.welcome = welcome
        if self._is_introducing:
            self._is_introducing = False
            self._resubmit(welcome)
        self.on_change()

    def _resubmit(self, welcome: FrontendWelcome) -> None:
        is_new_slot = welcome.slot != self._slot
        self._slot = welcome.slot
        self._outbox.clear()
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
                self.send(message)
        for kept in self._kept.messages(self._new_key):
            self.send(kept)
        for watch in self._watches.values():
            self.send(watch.opening())
        self.send(Ready())
        log.info("scheduler joined", slot=welcome.slot, scheduler=welcome.scheduler_incarnation, resubmitted=len(self._live))

    def _flush(self) -> None:
        """Sends what is kept, many messages as the parts of one: each message by itself would wake the scheduler, and ZeroMQ's thread."""
        self._is_flush_due = False
        while self._outbox and not self._socket.closed:
            parts = list(islice(self._outbox, MAX_PARTS))
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.Again:
                return
            for _ in parts:
                self._outbox.popleft()
            self._read_soon()

    def _tick(self) -> None:
        """Four times a second: pings, waiting messages, quiet streams, stuck readers, a scheduler that has gone silent."""
        now = time.monotonic()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        stopped_s, self._last_tick = now - self._last_tick - TICK_S, now
        if stopped_s > STOPPED_AFTER_S:
            self._last_heard = min(now, self._last_heard + stopped_s)
            for stream in self.calls:
                stream.forgive(stopped_s, now)
        if self._hello_due:
            self._hello()
        self._flush()
        if now - self._last_ping >= PING_S and not self._hello_due:
            self._last_ping = now  # also before the welcome: a scheduler restarted meanwhile then asks for our hello
            try:
                self._socket.send(encode(FrontendPing(slot=self._slot)), zmq.NOBLOCK)
            except zmq.Again:
                pass
        is_stalled = self.welcome is not None and (not self.is_connected or self.state is ServingState.STALLED)
        for stream in list(self.calls):
            stream.watch(now, self._slow_consumer_timeout_s, is_stalled)
        if self.welcome is not None and now - self._last_heard > LOST_AFTER_S:
            self.fail_all(Reason.SCHEDULER_LOST)
        self.on_change()
        self._read_soon()
