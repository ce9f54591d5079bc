"""How far a stream has been read, and whether and when to go on elsewhere when its connection breaks. Pure; both clients use it.

A stream that breaks with UNAVAILABLE is taken up with ResumeStream at the next token, on whatever server the channel reaches. Nothing
is repeated to the caller, and the events' numbers go on.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagecast.errors import Cancelled, DeadlineExceeded, NotFound, RpcError, Unavailable
from pagecast.v1 import generation_pb2 as pb

GIVE_UP_AFTER_S = 30.0
"""Without a single event for so long, the last error is final."""
FIRST_WAIT_S = 0.05
MOST_WAIT_S = 2.0
CANCEL_S = 5.0
"""What the word that a detached request is not wanted any more may take."""


def cancelled() -> Cancelled:
    """What a reader gets whose stream, or client, another thread or task has ended."""
    return Cancelled("CANCELLED", "the call was cancelled")


_NOBODY_THERE = ("", "STARTING", "RECOVERING", "SCHEDULER_LOST")
"""Reasons of UNAVAILABLE that say nothing of the request. Empty: the connection ended, not the server's patience."""


@dataclass(slots=True)
class Asking:
    """How often one whole answer was asked for in vain. It cannot be taken up where it broke: what a front end took with it is asked for
    again. deadline: monotonic seconds of the caller's timeout, or None. begun: when it was last asked for."""

    deadline: float | None
    begun: float = 0.0
    num_losses: int = 0
    _lost_since: float = 0.0

    @classmethod
    def of(cls, timeout: float | None) -> "Asking":
        return cls(None if timeout is None else time.monotonic() + timeout)

    def begin(self) -> float | None:
        """It is asked for now. Seconds that are left for the call."""
        self.begun = time.monotonic()
        return None if self.deadline is None else max(0.001, self.deadline - self.begun)

    def wait_after(self, error: RpcError) -> float:
        """Seconds to wait before it is asked for again. Raises the error where that is of no use: it is about the request, or nobody has
        been there for too long."""
        now = time.monotonic()
        if not self.num_losses or now - self.begun > GIVE_UP_AFTER_S:  # it was under way, and lost anew
            self.num_losses, self._lost_since = 0, now
        wait = min(MOST_WAIT_S, FIRST_WAIT_S * 2.0**self.num_losses)
        self.num_losses += 1
        ends = min(self._lost_since + GIVE_UP_AFTER_S, self.deadline or float("inf"))
        if not isinstance(error, Unavailable) or error.reason not in _NOBODY_THERE or now + wait >= ends:
            raise error
        return wait


@dataclass(slots=True)
class _Sequence:
    next_offset: int = 0
    text_bytes: int = 0
    reasoning_bytes: int = 0
    tool_call_bytes: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class Position:
    """What the reader of one stream has. deadline: monotonic seconds of the caller's timeout, or None."""

    request: pb.GenerateStreamRequest
    deadline: float | None
    is_wanted: bool = True
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _next_of_prompt: int = 0
    _last_seq: int = 0
    _num_failures: int = 0
    _broken_since: float | None = None
    _resumes: bool = False
    _last_failure: str = ""

    @classmethod
    def of(cls, request: pb.GenerateStreamRequest, timeout: float | None, is_wanted: bool) -> "Position":
        """The beginning of a stream. A request without an id gets one that a retry can join."""
        if is_wanted and not request.spec.request_id:
            request.spec.request_id = uuid.uuid4().hex
            request.spec.attach = True
        return cls(request, None if timeout is None else time.monotonic() + timeout, is_wanted)

    @property
    def request_id(self) -> str:
        return self.request.spec.request_id

    def cancellation(self) -> pb.CancelGenerationRequest | None:
        """What ends a request that would go on without its connection; None for one that ends with it."""
        if self.request.delivery.on_disconnect != pb.ON_DISCONNECT_DETACH:
            return None
        return pb.CancelGenerationRequest(request_id=self.request_id)

    def timeout(self) -> float | None:
        """Seconds that are left for the next call."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def call(self, stub: Any, metadata: Sequence[tuple[str, str]]) -> Any:
        """The next call on a synchronous or asynchronous stub: the first request, or where to go on from."""
        resume = self.resume_request()
        if resume is None:
            return stub.GenerateStream(self.request, timeout=self.timeout(), metadata=metadata)
        return stub.ResumeStream(resume, timeout=self.timeout(), metadata=metadata)

    def resume_request(self) -> pb.ResumeStreamRequest | None:
        """What to ask for next; None: the first request again."""
        if not self._resumes:
            return None
        cursors = [
            pb.SequenceCursor(
                sequence_index=index, next_token_offset=known.next_offset, text_bytes=known.text_bytes,
                reasoning_bytes=known.reasoning_bytes, tool_call_bytes=known.tool_call_bytes,
            )
            for index, known in sorted(self._sequences.items())
        ]
        return pb.ResumeStreamRequest(request_id=self.request_id, cursors=cursors, delivery=self.request.delivery)

    def take(self, event: pb.StreamEvent) -> pb.StreamEvent | None:
        """The event as the caller is to see it; None if it has seen it before."""
        self._num_failures, self._broken_since, self._last_failure = 0, None, ""
        kind = event.WhichOneof("event")
        if kind == "accepted" and self._last_seq:
            return None
        if kind == "prompt" and not self._is_news(event.prompt):
            return None
        if kind == "tokens":
            known = self._sequences.setdefault(event.tokens.sequence_index, _Sequence())
            known.next_offset = event.tokens.first_token_offset + max(event.tokens.num_tokens, len(event.tokens.token_ids))
            known.text_bytes += len(event.tokens.text.encode())
            known.reasoning_bytes += len(event.tokens.reasoning_text.encode())
            known.tool_call_bytes += sum(len(call.name.encode()) + len(call.arguments.encode()) for call in event.tokens.tool_calls)
        elif kind == "sequence_finished":
            known = self._sequences.setdefault(event.sequence_finished.sequence_index, _Sequence())
            if known.is_finished:
                return None
            known.is_finished = True
        self._last_seq += 1
        event.seq = self._last_seq
        return event

    def _is_news(self, prompt: pb.PromptEvent) -> bool:
        """Leaves only records of positions that the caller has not seen, if there are any."""
        known = max(0, self._next_of_prompt - prompt.first_position)
        del prompt.logprobs[:known]
        prompt.first_position += known
        self._next_of_prompt = max(self._next_of_prompt, prompt.first_position + len(prompt.logprobs))
        return len(prompt.logprobs) > 0

    def wait_after(self, error: RpcError) -> float:
        """Seconds to wait before the next call. Raises the error where there is to be none; one of a timeout with the failure before it,
        if there was one."""
        if isinstance(error, DeadlineExceeded) and not error.reason and self._last_failure:
            raise DeadlineExceeded(error.code, f"{error.message}: {self._last_failure}")
        if isinstance(error, Unavailable):
            self._last_failure = error.message
        now = time.monotonic()
        since = self._broken_since = now if self._broken_since is None else self._broken_since
        if isinstance(error, NotFound) and error.reason == "REQUEST_UNKNOWN" and not self._sequences and self._resumes:
            self._resumes = False  # it was lost before it put anything out: begin again
        elif not self._can_go_on(error):
            raise error
        else:
            self._resumes = self._last_seq > 0
        wait = min(MOST_WAIT_S, FIRST_WAIT_S * 2.0**self._num_failures)
        if self._num_failures and error.retry_after is not None:  # the first time another server may be free at once
            wait = max(wait, error.retry_after)
        self._num_failures += 1
        ends = min(since + GIVE_UP_AFTER_S, self.deadline or float("inf"))
        if now + wait >= ends:
            raise error
        return wait

    def _can_go_on(self, error: RpcError) -> bool:
        if not self.is_wanted or not isinstance(error, Unavailable):
            return False
        if not error.reason:
            return True  # the connection, not the server
        is_elsewhere = self._resumes and error.reason in ("STARTING", "RECOVERING", "DRAINING", "OVERLOADED")
        return error.metadata.get("resumable") == "true" or is_elsewhere
