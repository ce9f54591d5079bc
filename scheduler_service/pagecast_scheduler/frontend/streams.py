"""State of open requests between the scheduler's batches and the callers' writes.

`RequestStream` is fed by the engine client (`on_...`, once per step at most, no await) and read by a handler. It owns the token
ids received so far, which are also the history that a restarted scheduler needs. Ids stay packed until somebody wants text.
"""

import asyncio
import time
from array import array
from collections.abc import Callable

import msgspec

from pagecast_scheduler.frontend.delivery import DEFAULT_DELIVERY, Delivery
from pagecast_scheduler.frontend.errors import OF_FINISH, Reason, Refusal, future_offset, of_finished, of_rejected
from pagecast_scheduler.frontend.output_sequence import OutputSequence
from pagecast_scheduler.frontend.prepared_request import PreparedRequest, prompt_records_of
from pagecast_scheduler.frontend.quotas import Lease
from pagecast_scheduler.frontend.resuming import Cursor
from pagecast_wire.control import Attach, Attached, EarlierLogprobs, Leave
from pagecast_wire.intake import Finished, Pause, Phase, Progress, PromptLogprobs, Rejected, StopAt, TokenLogprobs, Usage
from pagecast_wire.sampling import FinishReason

MISTAKE_GRACE_MS = 10_000
"""A resume that asks for what cannot be leaves the request time for a better one."""

GATHER_TOKENS = 64
"""A whole answer is written on whenever so many tokens have come, each request's at a count of its own: those that began together would
else all be written at once."""


class RequestStream:
    """One open call. `send` puts a message on the scheduler's socket.

    Ends exactly once: `failure` is set, or every sequence is finished. is_streaming: a reader takes the output while it grows;
    only then is every arrival announced and back-pressure kept.
    """

    def __init__(
        self, request: PreparedRequest, sequences: list[OutputSequence], send: Callable[[msgspec.Struct], None], is_streaming: bool,
        delivery: Delivery = DEFAULT_DELIVERY, attach_to: Attach | None = None, cursors: dict[int, Cursor] | None = None,
    ) -> None:  # fmt: skip
        """attach_to: this call resumes a request, of which `request` only says the id until the scheduler has told the rest."""
        self.request = request
        self.delivery = delivery
        self.leave_grace_ms = 0  # how long the request is to go on when this call is over
        self._attach_to = attach_to
        self._cursors = cursors or {}
        self.sequences = sequences
        self.key = -1
        self.queue_position: int | None = None
        self.failure: Refusal | None = None
        self.progress: Progress | None = None
        self.failed_usage: Usage | None = None
        self._ends: dict[int, Finished] = {}
        self.kept_until: float | None = None  # nobody reads this; it is remembered so long, for a scheduler that may need it
        self.prompt_records = None if attach_to is not None else prompt_records_of(request)
        self.is_progress_due = False
        self.is_stalled = False  # the engine makes no progress with anything
        self.started = time.monotonic()
        self.last_write = self.started
        self.writing_since: float | None = None
        self.is_streaming = is_streaming
        self.lease: Lease | None = None  # what the request holds of its principal's quota
        self._send = send
        self._is_paused = False
        self._is_gathering = False
        self._wake_at = GATHER_TOKENS  # tokens that are to be written to a whole answer
        self._reported_phase = Phase.QUEUED
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the scheduler has nothing more to say about this request."""
        return self.failure is not None or (
            bool(self.sequences) and all(sequence.finished is not None for sequence in self.sequences)
        )  # fmt: skip

    @property
    def is_queued(self) -> bool:
        """Whether the scheduler has not begun with this request, as far as is known here."""
        is_untouched = self.progress is None or self.progress.phase == Phase.QUEUED
        return not self.is_done and is_untouched and not any(sequence.ids for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        """Whether the scheduler has ended every sequence. When one fails the call is done, but the others run until they are aborted."""
        return self.is_done and len(self._ends) >= len(self.sequences)

    @property
    def num_emitted(self) -> int:
        """Tokens handed to the caller, over all sequences."""
        return sum(sequence.num_delivered for sequence in self.sequences)

    @property
    def num_used(self) -> int:
        """Tokens that count against the caller's quota: prompt and output; none of a request that was never accepted."""
        if self.queue_position is None:
            return 0
        return self.request.num_prompt_tokens + sum(sequence.num_output_tokens for sequence in self.sequences)

    def settle(self) -> None:
        """The request is over: what it did not use of its principal's quota comes back."""
        if self.lease is not None:
            self.lease.end(self.num_used)

    def usage_so_far(self) -> dict[str, str]:
        """Usage of a call that failed, as ErrorInfo metadata: what the scheduler counted at the end, else what arrived."""
        ends = [s.finished.usage for s in self.sequences if s.finished is not None]
        ends += [self.failed_usage] if self.failed_usage is not None else []
        cached = ends[0].cached_tokens if ends else self.progress.cached_tokens if self.progress is not None else 0
        counts = {
            "prompt_tokens": self.request.num_prompt_tokens,
            "cached_prompt_tokens": cached,
            "output_tokens": sum(s.num_output_tokens for s in self.sequences),
            "recomputed_tokens": sum(u.recomputed_tokens for u in ends),
        }
        return {name: str(value) for name, value in counts.items()}

    def on_accepted(self, queue_position: int) -> None:
        """Admission to the queue; repeated after a resubmission."""
        if self.queue_position is None:
            self.queue_position = queue_position
            self._wake()

    def on_attached(self, attached: Attached, request: PreparedRequest, sequences: list[OutputSequence]) -> None:
        """The request exists already: this call reads on from its cursors. Repeated when a scheduler came back, to fill what is missing."""
        if self.queue_position is None:
            self.request, self.sequences, self._attach_to = request, sequences, None
            self.prompt_records = prompt_records_of(request)
            self.started = time.monotonic() - attached.elapsed_ms / 1000
        for index, sequence in enumerate(self.sequences):
            sequence.receive_earlier_logprobs([record for record in attached.logprobs if record.sequence == index])
        for part in attached.prompt_logprobs:
            self.on_prompt_logprobs(part)
        if self.queue_position is None and not self._begin_at_cursors(attached.submit.history):
            self.leave_grace_ms = MISTAKE_GRACE_MS
        for index, column in enumerate(attached.submit.history):
            self.on_tokens(index, 0, memoryview(column))
        for finished in attached.finished:
            self.on_finished(finished)
        self.on_accepted(attached.queue_position)

    def _begin_at_cursors(self, outputs: tuple[bytes, ...]) -> bool:
        """Passes over what the reader has. False, and the call has failed, if it says that it has what does not exist."""
        for index, column in enumerate(outputs):
            cursor, sequence = self._cursors.get(index, Cursor()), self.sequences[index]
            if cursor.next_offset * 4 > len(column):
                self.fail(future_offset(index, cursor.next_offset, len(column) // 4))
                return False
            if sequence.receive(0, memoryview(column)[: 4 * cursor.next_offset]):
                self._send(StopAt(key=self.key, sequence=index, keep=sequence.num_output_tokens))
            if self.request.spec.want_text:
                sequence.skip(cursor.text_bytes, cursor.reasoning_bytes, cursor.tool_call_bytes)
            else:
                sequence.skip()
            if cursor.next_offset and self.prompt_records is not None:
                self.prompt_records.take()  # they come before the first token
        return True

    def on_rejected(self, rejected: Rejected) -> None:
        """The scheduler refuses the request."""
        refusal = of_rejected(rejected)
        if refusal.reason in (Reason.REQUEST_ID_IN_USE, Reason.REQUEST_UNKNOWN):
            refusal.resource = ("pagecast.v1.Request", self.request.request_id)
        self.fail(refusal)

    def on_tokens(self, sequence: int, offset: int, tokens: memoryview) -> None:
        """New tokens of one sequence, packed u32."""
        output = self.sequences[sequence]
        if output.receive(offset, tokens):
            self._send(StopAt(key=self.key, sequence=sequence, keep=output.num_output_tokens))
        if self.is_streaming:
            if not self._is_paused and len(output.ids) - output.num_delivered > self.delivery.credit_tokens:
                self._on_unread()
            if not self._is_gathering:
                self._wake()
        elif len(output.ids) - output.num_delivered >= self._wake_at:
            self._wake_at = GATHER_TOKENS
            self._wake()

    def _on_unread(self) -> None:
        if self.delivery.pauses:
            self._is_paused = True
            self._send(Pause(key=self.key, paused=True))
        else:
            self.fail(Refusal(Reason.SLOW_CONSUMER))

    def on_logprobs(self, record: TokenLogprobs) -> None:
        """Log-probabilities of one output token; they come with the batch that brings the token."""
        self.sequences[record.sequence].receive_logprobs(record)

    def on_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Log-probabilities of some of the prompt's tokens."""
        if self.prompt_records is not None and self.prompt_records.receive(part) and self.is_streaming:
            self._wake()

    def on_progress(self, progress: Progress) -> None:
        """Phase or prefill progress; a new phase other than decoding, which tokens show, is reported at once."""
        self.progress = progress
        if progress.phase != self._reported_phase:
            self._reported_phase = progress.phase
            if progress.phase != Phase.DECODING:
                self.is_progress_due = True
                self._wake()

    def on_finished(self, finished: Finished) -> None:
        """End of one sequence."""
        self._ends[finished.sequence] = finished
        if finished.reason in OF_FINISH:
            self.failed_usage = finished.usage
            self.fail(of_finished(finished, self.request.submit.sampling.constraint is not None))
            return
        self.sequences[finished.sequence].end(finished)
        if self.is_streaming or self.is_done:
            self._wake()

    def fail(self, refusal: Refusal) -> None:
        """Ends the call with an error, once; a handler stuck in a write is interrupted."""
        if self.failure is not None:
            return
        self.failure = refusal
        if self.writing_since is not None and self._task is not None:
            self._task.cancel()
        self._wake()

    def attach(self) -> None:
        """The current task is the one that answers this call."""
        self._task = asyncio.current_task()
        self._wake_at = 1 + self.key % GATHER_TOKENS

    async def wait(self) -> None:
        """Returns when something new was fed; call only when nothing is left to take."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def gather(self) -> None:
        """Lets output gather for the call's flush interval since the last write; ends early with the stream."""
        left = self.last_write + self.delivery.flush_interval_s - time.monotonic()
        if left <= 0 or not self.num_emitted or self.is_done or self.is_progress_due:
            return
        self._is_gathering = True
        try:
            async with asyncio.timeout(left):
                await self.wait()
        except TimeoutError:
            pass
        finally:
            self._is_gathering = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def has_output(self) -> bool:
        """Whether a handler has something to deliver."""
        if self.prompt_records is not None and self.prompt_records.has_new:
            return True
        return self.failure is not None or self.is_progress_due or any(
            s.num_delivered < s.num_output_tokens or (s.finished is not None and not s.is_reported) for s in self.sequences
        )

    def note_delivered(self) -> None:
        """All that was taken has been written: the request may go on."""
        self.last_write = time.monotonic()
        if self._is_paused and not any(s.num_delivered < s.num_output_tokens for s in self.sequences):
            self._is_paused = False
            self._send(Pause(key=self.key, paused=False))

    def watch(self, now: float, slow_consumer_timeout_s: float, is_stalled: bool) -> None:
        """Periodic check: a quiet stream owes a progress event, a stuck reader loses its stream; a stalled engine is told of at once."""
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            if self.queue_position is not None:
                self.is_progress_due = True
                self._wake()
        if self.writing_since is not None:
            if now - self.writing_since > slow_consumer_timeout_s:
                self.fail(Refusal(Reason.SLOW_CONSUMER))
        elif self.queue_position is not None and now - self.last_write >= self.delivery.progress_interval_s:
            self.is_progress_due = True
            self._wake()

    def forgive(self, stopped_s: float, now: float) -> None:
        """This process was stopped for so long: the reader of a write under way has had no chance to take it."""
        if self.writing_since is not None:
            self.writing_since = min(now, self.writing_since + stopped_s)

    def without_caller(self, until: float) -> "RequestStream | None":
        """This request as the process remembers it when the call is over; None where the call has not learned what it is, and for a
        process that is about to end."""
        if self._attach_to is not None or (self.failure is not None and self.failure.reason is Reason.DRAIN_TIMEOUT):
            return None
        kept = RequestStream(self.request, self.sequences, self._send, False)
        kept.key, kept.queue_position, kept.started, kept.progress = self.key, self.queue_position, self.started, self.progress
        kept._ends, kept.prompt_records, kept.kept_until = self._ends, self.prompt_records, until
        kept.lease = self.lease
        if kept.lease is not None:
            kept.lease.leave()
        return kept

    def as_ended(self, now: float) -> Attached:
        """All there is of a request that is over, as its late readers will be told."""
        outputs = tuple(s.ids.tobytes() for s in self.sequences)
        return Attached(
            msgspec.structs.replace(self.request.submit, key=self.key, history=outputs), self.queue_position or 0,
            int((now - self.started) * 1000), tuple(self._ends[index] for index in sorted(self._ends)),
            tuple(record for s in self.sequences for record in s.logprobs),
            () if self.prompt_records is None else tuple(self.prompt_records.parts),
        )  # fmt: skip

    def resubmission(self, now: float) -> list[msgspec.Struct]:
        """Messages that bring this request back to a scheduler that lost it; empty when its output is complete already, or nobody will
        come for it any more."""
        if self._attach_to is not None:
            return [msgspec.structs.replace(self._attach_to, key=self.key)]
        submit = self.request.submit
        if self._complete_locally(now) or (self.kept_until is not None and self.kept_until <= now):
            return []
        deadline = self.request.deadline
        changes = {
            "key": self.key,
            "history": () if self.queue_position is None else tuple(s.ids.tobytes() for s in self.sequences),
            "deadline_ms": -1 if deadline is None else max(0, int((deadline - now) * 1000)),
            "time_budget_ms": -1 if submit.time_budget_ms < 0 else max(1, submit.time_budget_ms - int((now - self.started) * 1000)),
            "max_queue_ms": submit.max_queue_ms if self.queue_position is None else -1,
            "identity": msgspec.structs.replace(submit.identity, join=True),  # another front end may have brought it back already
        }
        messages: list[msgspec.Struct] = [msgspec.structs.replace(submit, **changes)]
        stopped = [s for s in self.sequences if s.matched_stop is not None]
        messages += [StopAt(key=self.key, sequence=s.index, keep=s.num_output_tokens) for s in stopped]
        if records := tuple(record for s in self.sequences for record in s.logprobs):
            messages.append(EarlierLogprobs(self.key, records))
        if self._is_paused:
            messages.append(Pause(key=self.key, paused=True))
        if self.kept_until is not None:
            messages.append(Leave((self.key,), max(MISTAKE_GRACE_MS, int((self.kept_until - now) * 1000)), keeps=True))
        return messages

    def _complete_locally(self, now: float) -> bool:
        """Finishes sequences whose last token had arrived when the word of their end was lost."""
        rules = self.request.submit.stop
        stop_ids = array("I", rules.stop_token_ids)
        for output in self.sequences:
            if output.finished is not None:
                continue
            count = output.num_output_tokens
            stopped_by = output.ids[-1] if count > rules.min_output_tokens and output.ids[-1] in stop_ids else -1
            if output.matched_stop is not None or stopped_by >= 0 or count >= rules.max_output_tokens:
                reason = FinishReason.LENGTH if output.matched_stop is None and stopped_by < 0 else FinishReason.STOP
                self.on_finished(Finished(self.key, output.index, reason, self._local_usage(output, now), stopped_by))
        return self.is_done

    def _local_usage(self, output: OutputSequence, now: float) -> Usage:
        cached = self.progress.cached_tokens if self.progress is not None else 0
        total_us = int((now - self.started) * 1e6)
        return Usage(self.request.num_prompt_tokens, cached, output.num_output_tokens, 0, 0, 0, total_us, 0, 0)
