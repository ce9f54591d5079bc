"""How a front end shows a request that another call, perhaps of another front end, began.

The scheduler keeps the request itself and its tokens; what the caller sees of it (texts, stop texts, which fields) is made again from a
description that travelled with the request. The scheduler does not look into it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from pagecast_scheduler.frontend.answer_parser import AnswerPlan
from pagecast_scheduler.frontend.call_forms import CALL_FORMATS, FORCED
from pagecast_scheduler.frontend.errors import field_violation
from pagecast_scheduler.frontend.output_parts import REASONING_FORMATS
from pagecast_scheduler.frontend.output_sequence import OutputSequence
from pagecast_scheduler.frontend.prepared_request import PreparedRequest
from pagecast_scheduler.frontend.principals import Principal
from pagecast_scheduler.frontend.validation import CheckedSpec
from pagecast_wire.control import Attach, Attached


class View(msgspec.Struct, frozen=True, array_like=True):
    """What a front end must know besides the Submit. All front ends of a cluster are of one build."""

    model: str
    model_digest: str
    spec: CheckedSpec
    calls: str
    reasoning: str
    reasoning_is_open: bool
    tools: tuple[str, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(View)


_CALL_FORMS = {row.name: row for row in (*CALL_FORMATS, FORCED)}
_REASONING_FORMS = {row.name: row for row in REASONING_FORMATS}


def pack(model: str, model_digest: str, spec: CheckedSpec, answer: AnswerPlan) -> bytes:
    """The description that goes along. Forms of answers travel by name."""
    calls = "" if answer.calls is None else answer.calls.name
    reasoning = "" if answer.reasoning is None else answer.reasoning.name
    return _encoder.encode(View(model, model_digest, spec, calls, reasoning, answer.reasoning_is_open, tuple(sorted(answer.tools))))


def unpack(attached: Attached, deadline: float | None, principal: Principal) -> PreparedRequest:
    """The request as the front end that began it had prepared it. deadline: monotonic seconds, of the call that began it."""
    submit = msgspec.structs.replace(attached.submit, history=())
    view = _decoder.decode(submit.identity.spec)
    answer = AnswerPlan(
        _CALL_FORMS.get(view.calls), _REASONING_FORMS.get(view.reasoning), view.reasoning_is_open, frozenset(view.tools)
    )  # fmt: skip
    return PreparedRequest(
        submit.identity.request_id, view.model, view.model_digest, view.spec, submit, len(submit.prompt) // 4, deadline, principal, answer
    )  # fmt: skip


def digest_of(spec: Any) -> bytes:
    """SHA-256 over what a GenerationSpec asks for: equal for a retry, whatever its request_id, its labels and its wish to attach."""
    asked = spec
    if spec.request_id or spec.attach or spec.labels:
        asked = type(spec)()
        asked.CopyFrom(spec)
        asked.ClearField("request_id")
        asked.ClearField("attach")
        asked.ClearField("labels")
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()


def unknown_yet(attach: Attach, principal: Principal) -> tuple[PreparedRequest, list[OutputSequence]]:
    """Stands for a request of which only the id is known until the scheduler answers."""
    return PreparedRequest(attach.request_id, "", "", None, attach, 0, None, principal), []  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of a sequence a resuming reader has: tokens, and UTF-8 bytes of text, reasoning and tool calls where it says so."""

    next_offset: int = 0
    text_bytes: int | None = None
    reasoning_bytes: int | None = None
    tool_call_bytes: int | None = None


def cursors_of(request: Any) -> dict[int, Cursor]:
    """Where a resume begins in each sequence. Raises Refusal for a sequence that is named twice."""
    cursors: dict[int, Cursor] = {}
    for i, cursor in enumerate(request.cursors):
        if cursor.sequence_index in cursors:
            raise field_violation(f"cursors[{i}].sequence_index", f"must be given once each, not {cursor.sequence_index} twice")
        given = [getattr(cursor, name) if cursor.HasField(name) else None for name in ("text_bytes", "reasoning_bytes", "tool_call_bytes")]
        cursors[cursor.sequence_index] = Cursor(cursor.next_token_offset, *given)
    return cursors
