"""What is known of the call that the current task answers: who calls, and what its metadata says. Set by the interceptor
before any handler runs, read wherever it matters; a task without a call counts as an anonymous one."""

import random
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.principals import ANONYMOUS, Principal
from pagecast_scheduler.frontend.validation import is_request_id
from pagecast_wire.intake import Priority

MAX_REQUEST_ID = 128
PRIORITY_KEY = "pagecast-priority"
_ONCE = ("authorization", "traceparent", "tracestate", "x-request-id", PRIORITY_KEY)
"""Metadata that means something here, and may therefore stand only once."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")
_MAX_TRACESTATE_MEMBERS = 32


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context. parent_id: the caller's span, "" if the trace begins here; span_id: ours. is_sampled: whether
    spans of it are recorded, which whoever began it decides."""

    trace_id: str
    parent_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


@dataclass(slots=True)
class Call:
    """One call. request_id: that of the metadata, "" if there is none; a handler that knows better puts its own. reason: the refusal
    that ended the call, by name. labels: the caller's notes on the request."""

    principal: Principal = ANONYMOUS
    trace: Trace = field(default_factory=lambda: begin_trace())
    request_id: str = ""
    priority: Priority | None = None
    authorization: str | None = None
    reason: str = ""
    labels: tuple[tuple[str, str], ...] = ()


_trace_ids = random.Random(secrets.randbits(256))
"""Traces need ids that differ, not ids that nobody can guess; a system call for each would be felt."""


_current: ContextVar[Call | None] = ContextVar("pagecast_call", default=None)


def current() -> Call:
    """The call that this task answers."""
    return _current.get() or Call()


def enter(call: Call) -> None:
    """Makes `call` the one that this task, and tasks it starts, answer."""
    _current.set(call)


def begin_trace() -> Trace:
    """A trace of our own."""
    return Trace(f"{_trace_ids.getrandbits(128) or 1:032x}", "", span_id(), True)


def span_id() -> str:
    """A span's; never zero, which would be none."""
    return f"{_trace_ids.getrandbits(64) or 1:016x}"


def read_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Call:
    """The call that this metadata describes, not yet authenticated. Raises Refusal, naming each key that is repeated or malformed."""
    given: dict[str, str] = {}
    wrong: list[Violation] = []
    for key, value in metadata:
        if key not in _ONCE:
            continue
        if key in given:
            wrong.append(Violation(f"metadata.{key}", "must be given once"))
        given[key] = value if isinstance(value, str) else ""
    call = Call(authorization=given.get("authorization"))
    if (parent := given.get("traceparent")) is not None:
        trace = parse_traceparent(parent, given.get("tracestate", ""))
        if trace is None:
            text = "must be a W3C traceparent: version-trace_id-parent_id-flags in lowercase hexadecimal"
            wrong.append(Violation("metadata.traceparent", text))
        else:
            call.trace = trace
    if not is_tracestate(given.get("tracestate", "")):
        wrong.append(Violation("metadata.tracestate", f"must be a W3C tracestate of at most {_MAX_TRACESTATE_MEMBERS} members"))
    if (request_id := given.get("x-request-id")) is not None:
        call.request_id = request_id
        if not is_request_id(request_id, MAX_REQUEST_ID):
            text = f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without spaces"
            wrong.append(Violation("metadata.x-request-id", text))
    if (priority := given.get(PRIORITY_KEY)) is not None:
        if priority.upper() in Priority.__members__ and priority.islower():
            call.priority = Priority[priority.upper()]
        else:
            wrong.append(Violation(f"metadata.{PRIORITY_KEY}", f"must be one of {', '.join(p.name.lower() for p in Priority)}"))
    if wrong:
        raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(dict.fromkeys(wrong)))
    return call


def parse_traceparent(text: str, state: str) -> Trace | None:
    """The trace to go on with, under a span of our own; None for what is no traceparent. Later versions may append fields."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or set(trace_id) == {"0"} or set(parent_id) == {"0"}:
        return None
    return Trace(trace_id, parent_id, span_id(), bool(int(flags, 16) & 1), state)


def is_tracestate(text: str) -> bool:
    """Whether this is a list of key=value members with keys that differ; the empty text is one."""
    members = [member.strip(" \t") for member in text.split(",") if member.strip(" \t")]
    keys = [member.partition("=")[0] for member in members]
    return len(members) <= _MAX_TRACESTATE_MEMBERS and len(set(keys)) == len(keys) and all(map(_TRACESTATE_MEMBER.fullmatch, members))
