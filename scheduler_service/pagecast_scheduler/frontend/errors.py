"""Every way a call can end badly: one table of reasons and status codes, and the google.rpc details that go with them.

Handlers raise `Refusal`; `boundary` turns it into a status with trailers. Texts name field, limit and value; they never hold
exception text, paths or prompts.
"""

from dataclasses import dataclass, field
from enum import Enum

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pagecast_wire.intake import Finished, Rejected, RejectReason
from pagecast_wire.sampling import ConstraintFault, FinishReason

DOMAIN = "pagecast"
Metadata = tuple[tuple[str, str | bytes], ...]

_CODE = grpc.StatusCode


class Reason(Enum):
    """Closed set of reasons: (status code, default message). The name goes into ErrorInfo.reason."""

    MALFORMED_REQUEST = (_CODE.INVALID_ARGUMENT, "the request is not a valid message of this method")
    FIELD_VIOLATION = (_CODE.INVALID_ARGUMENT, "the request has invalid fields")
    PROMPT_TOO_LONG = (_CODE.INVALID_ARGUMENT, "the prompt is too long")
    CONSTRAINT_INVALID = (_CODE.INVALID_ARGUMENT, "the constraint cannot be enforced")
    MODEL_UNKNOWN = (_CODE.NOT_FOUND, "no such model is served here")
    ADAPTER_UNKNOWN = (_CODE.NOT_FOUND, "no such adapter is loaded here")
    SERVICE_UNKNOWN = (_CODE.NOT_FOUND, "no such service is served here")
    REQUEST_UNKNOWN = (_CODE.NOT_FOUND, "no such request is open or kept here")
    REQUEST_ID_IN_USE = (_CODE.ALREADY_EXISTS, "a live request already has this request_id")
    FEATURE_DISABLED = (_CODE.FAILED_PRECONDITION, "the model does not support this")
    TOKEN_MISSING = (_CODE.UNAUTHENTICATED, "a bearer token or a client certificate that is known here is needed")
    TOKEN_INVALID = (_CODE.UNAUTHENTICATED, "the bearer token is not known here")
    TOKEN_EXPIRED = (_CODE.UNAUTHENTICATED, "the bearer token has expired")
    ROLE_MISSING = (_CODE.PERMISSION_DENIED, "the caller has not the role that this method needs")
    MODEL_NOT_ALLOWED = (_CODE.PERMISSION_DENIED, "the caller may not use this model")
    PRIORITY_NOT_ALLOWED = (_CODE.PERMISSION_DENIED, "the caller may not ask for this priority")
    QUOTA_REQUESTS = (_CODE.RESOURCE_EXHAUSTED, "the caller's quota of requests is used up")
    QUOTA_TOKENS = (_CODE.RESOURCE_EXHAUSTED, "the caller's quota of tokens is used up")
    MESSAGE_TOO_LARGE = (_CODE.RESOURCE_EXHAUSTED, "the message is larger than this server takes")
    SLOW_CONSUMER = (_CODE.RESOURCE_EXHAUSTED, "the stream was not read for too long")
    STEP_MEMORY = (_CODE.RESOURCE_EXHAUSTED, "a step of this request alone does not fit the device's memory")
    OVERLOADED = (_CODE.UNAVAILABLE, "the queue is full")
    QUEUE_TIME_EXCEEDED = (_CODE.UNAVAILABLE, "the request would wait, or has waited, longer than max_queue_time")
    DRAINING = (_CODE.UNAVAILABLE, "the server is draining: it takes no new requests")
    STARTING = (_CODE.UNAVAILABLE, "the server is still starting")
    RECOVERING = (_CODE.UNAVAILABLE, "the server is recovering")
    WORKER_LOST = (_CODE.UNAVAILABLE, "the worker was lost and the request's recovery budget is spent")
    DRAIN_TIMEOUT = (_CODE.UNAVAILABLE, "the server shut down before the stream ended")
    SCHEDULER_LOST = (_CODE.UNAVAILABLE, "the scheduler was lost and did not come back in time")
    DEADLINE_UNREACHABLE = (_CODE.DEADLINE_EXCEEDED, "the deadline cannot be met")
    DEADLINE_PASSED = (_CODE.DEADLINE_EXCEEDED, "the deadline has passed")
    BY_CLIENT = (_CODE.CANCELLED, "another call of the same caller took the request with it")
    BY_API = (_CODE.CANCELLED, "the request was cancelled by CancelGeneration")
    BY_ADMIN = (_CODE.CANCELLED, "the request was cancelled by an operator")
    NUMERIC_FAULT = (_CODE.INTERNAL, "the model produced no valid number for this request")
    POISON_REQUEST = (_CODE.INTERNAL, "the request repeatedly brought a worker down")
    CONSTRAINT_FAILED = (_CODE.INVALID_ARGUMENT, "the request's constraint or token rules cannot be followed")
    CONSTRAINT_TIMEOUT = (_CODE.INTERNAL, "the constraint could not be compiled in time")
    BUG = (_CODE.INTERNAL, "internal error")

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of this reason."""
        return self.value[0]


RETRY_AFTER_MS = 500
"""Retry advice where the scheduler gives none of its own."""

_RETRYABLE = frozenset(
    {
        Reason.OVERLOADED,
        Reason.QUEUE_TIME_EXCEEDED,
        Reason.DRAINING,
        Reason.STARTING,
        Reason.RECOVERING,
        Reason.SCHEDULER_LOST,
        Reason.WORKER_LOST,
        Reason.DRAIN_TIMEOUT,
        Reason.QUOTA_REQUESTS,
        Reason.QUOTA_TOKENS,
    }
)

OF_REJECT: dict[RejectReason, Reason] = {
    RejectReason.OVERLOADED: Reason.OVERLOADED,
    RejectReason.STARTING: Reason.STARTING,
    RejectReason.DRAINING: Reason.DRAINING,
    RejectReason.RECOVERING: Reason.RECOVERING,
    RejectReason.PROMPT_TOO_LONG: Reason.PROMPT_TOO_LONG,
    RejectReason.TOO_MANY_TOKENS: Reason.FIELD_VIOLATION,
    RejectReason.DEADLINE_UNREACHABLE: Reason.DEADLINE_UNREACHABLE,
    RejectReason.QUEUE_TIME_EXCEEDED: Reason.QUEUE_TIME_EXCEEDED,
    RejectReason.DUPLICATE_KEY: Reason.BUG,
    RejectReason.INVALID: Reason.FIELD_VIOLATION,
    RejectReason.REQUEST_ID_IN_USE: Reason.REQUEST_ID_IN_USE,
    RejectReason.REQUEST_UNKNOWN: Reason.REQUEST_UNKNOWN,
}
"""One row per way the scheduler refuses a submit."""

OF_FINISH: dict[FinishReason, Reason] = {
    FinishReason.CANCELLED: Reason.BY_CLIENT,
    FinishReason.CANCELLED_BY_API: Reason.BY_API,
    FinishReason.CANCELLED_BY_ADMIN: Reason.BY_ADMIN,
    FinishReason.DEADLINE_EXCEEDED: Reason.DEADLINE_PASSED,
    FinishReason.QUEUE_TIME_EXCEEDED: Reason.QUEUE_TIME_EXCEEDED,
    FinishReason.NUMERIC_FAULT: Reason.NUMERIC_FAULT,
    FinishReason.WORKER_LOST: Reason.WORKER_LOST,
    FinishReason.POISON_REQUEST: Reason.POISON_REQUEST,
    FinishReason.CONSTRAINT_FAILED: Reason.CONSTRAINT_FAILED,
    FinishReason.STEP_MEMORY: Reason.STEP_MEMORY,
}
"""One row per way an accepted request ends without success; the other finish reasons are successes."""

_FIELD_OF_WIRE = {
    "prompt": "spec.input",
    "max_output_tokens": "spec.stopping.max_output_tokens",
    "min_output_tokens": "spec.stopping.min_output_tokens",
    "stop_token_ids": "spec.stopping.stop_token_ids",
    "stop": "spec.stopping",
    "sampling": "spec.sampling",
}


MOST_TOLD = 1800
"""Characters of violations in a status. They stand in the call's message and, in base64, twice in its details: together below 8 KiB."""
_AROUND_VIOLATION = 12
_MOST_PATH, _MOST_TEXT = 200, 1000


def _trailer_size(text: str) -> int:
    """Characters that a text takes in a status message, where bytes that are not ASCII take three each."""
    return len(text) if text.isascii() else sum(1 if byte < 128 else 3 for byte in text.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field: its path in the request, and what is wrong with it (limit and value included)."""

    field: str
    description: str


@dataclass(slots=True, eq=False)
class Refusal(Exception):
    """Ends a call with a status. `metadata` goes into ErrorInfo; numbers are given as text there."""

    reason: Reason
    message: str = ""
    violations: tuple[Violation, ...] = ()
    retry_after_ms: int = 0
    resource: tuple[str, str] | None = None
    quota: tuple[str, str] | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def told(self) -> tuple[Violation, ...]:
        """The violations that fit into trailers. What is larger than 8 KiB clients refuse, and the call's own status with it."""
        left, kept = MOST_TOLD, []
        for violation in self.violations:
            cut = Violation(violation.field[:_MOST_PATH], violation.description[:_MOST_TEXT])
            left -= _trailer_size(cut.field) + _trailer_size(cut.description) + _AROUND_VIOLATION
            if left < 0 and kept:
                break
            kept.append(cut)
        return tuple(kept)

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status with every detail that fits."""
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason.name, domain=DOMAIN, metadata=self.metadata)]
        if self.violations:
            fields = [error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description) for v in self.told()]
            details.append(error_details_pb2.BadRequest(field_violations=fields))
        if self.resource is not None:
            kind, name = self.resource
            details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name, description=self.message))
        if self.quota is not None:
            subject, description = self.quota
            details.append(error_details_pb2.QuotaFailure(violations=[{"subject": subject, "description": description}]))
        if delay := self.retry_delay_ms():
            wait = duration_pb2.Duration()
            wait.FromMilliseconds(delay)
            details.append(error_details_pb2.RetryInfo(retry_delay=wait))
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        return status_pb2.Status(code=self.reason.code.value[0], message=self.text(), details=packed)

    def retry_delay_ms(self) -> int:
        """Milliseconds a client should wait before a retry; 0: no retry advice."""
        if self.reason not in _RETRYABLE:
            return 0
        return self.retry_after_ms or RETRY_AFTER_MS

    def text(self) -> str:
        """The status message."""
        text = self.message or self.reason.value[1]
        if not self.violations:
            return text
        told = self.told()
        more = "; and more" if len(told) < len(self.violations) else ""
        return f"{text}: {'; '.join(f'{v.field}: {v.description}' for v in told)}{more}"

    def trailers(self) -> Metadata:
        """Trailing metadata: the binary status and, with RetryInfo, gRPC's own pushback."""
        trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", self.status().SerializeToString())]
        if delay := self.retry_delay_ms():
            trailers.append(("grpc-retry-pushback-ms", str(delay)))
        return tuple(trailers)


def field_violation(path: str, description: str) -> Refusal:
    """A refusal for one bad field."""
    return Refusal(Reason.FIELD_VIOLATION, violations=(Violation(path, description),))


def future_offset(index: int, offset: int, known: int) -> Refusal:
    """A refusal for a resume cursor beyond what exists."""
    return field_violation(f"cursors[{index}].next_token_offset", f"must be at most the {known} tokens that there are, not {offset}")


def model_unknown(name: str, served: str) -> Refusal:
    """NOT_FOUND for a model name, cut so that a long name does not come back in full. served: the name that would be right."""
    message = f"no model {name[:128]!r} is served here, but {served[:128]!r}"
    return Refusal(Reason.MODEL_UNKNOWN, message, resource=("pagecast.v1.Model", name[:128]))


def adapter_unknown(name: str) -> Refusal:
    """NOT_FOUND for the name of an adapter: none are loaded."""
    return Refusal(Reason.ADAPTER_UNKNOWN, resource=("pagecast.v1.Adapter", name[:128]))


_FAULTS = {
    ConstraintFault.INVALID: "does not compile for this model's tokens",
    ConstraintFault.TOO_LARGE: "grows beyond what the server allows",
    ConstraintFault.TIMED_OUT: "takes too long to compile",
    ConstraintFault.NO_TOKEN: "with the token rules leaves no token to choose from",
}


def of_finished(finished: Finished, is_constrained: bool) -> Refusal:
    """What a caller is told when an accepted request ends without success. Token rules can leave no token without a constraint too."""
    refusal = Refusal(OF_FINISH[finished.reason])
    if finished.reason is FinishReason.CONSTRAINT_FAILED:
        fault = ConstraintFault(finished.constraint_fault)
        if fault is ConstraintFault.TIMED_OUT:
            refusal.reason = Reason.CONSTRAINT_TIMEOUT
        if is_constrained:
            refusal.violations = (Violation("spec.constraint", _FAULTS.get(fault, "cannot be followed")),)
        else:
            refusal.violations = (Violation("spec.sampling", "the token rules leave no token to choose from"),)
        refusal.metadata = {"fault": fault.name}
    return refusal


def of_rejected(rejected: Rejected) -> Refusal:
    """What a caller is told when the scheduler refuses its request."""
    reason = OF_REJECT[rejected.reason]
    refusal = Refusal(reason, retry_after_ms=rejected.retry_after_ms)
    if reason in (Reason.PROMPT_TOO_LONG, Reason.FIELD_VIOLATION):
        path = _FIELD_OF_WIRE.get(rejected.field, "spec")
        text = f"{rejected.actual} exceeds the limit of {rejected.limit}" if rejected.limit else "is not valid"
        refusal.violations = (Violation(path, text),)
        refusal.metadata = {"limit": str(rejected.limit), "actual": str(rejected.actual)}
    return refusal
