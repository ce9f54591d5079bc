"""The table of statuses and reasons that callers rely on: every row exists, says what it must, and is said somewhere."""

import ast
import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from pagecast_scheduler.frontend import errors
from pagecast_scheduler.frontend.errors import OF_FINISH, OF_REJECT, Reason, Refusal, of_finished, of_rejected
from pagecast_wire.intake import Finished, Rejected, RejectReason, Usage
from pagecast_wire.sampling import ConstraintFault, FinishReason

TABLE = {
    "INVALID_ARGUMENT": "MALFORMED_REQUEST FIELD_VIOLATION PROMPT_TOO_LONG CONSTRAINT_INVALID CONSTRAINT_FAILED",
    "UNAUTHENTICATED": "TOKEN_MISSING TOKEN_INVALID TOKEN_EXPIRED",
    "PERMISSION_DENIED": "ROLE_MISSING MODEL_NOT_ALLOWED PRIORITY_NOT_ALLOWED",
    "NOT_FOUND": "MODEL_UNKNOWN ADAPTER_UNKNOWN SERVICE_UNKNOWN REQUEST_UNKNOWN",
    "ALREADY_EXISTS": "REQUEST_ID_IN_USE",
    "FAILED_PRECONDITION": "FEATURE_DISABLED",
    "RESOURCE_EXHAUSTED": "QUOTA_REQUESTS QUOTA_TOKENS MESSAGE_TOO_LARGE SLOW_CONSUMER STEP_MEMORY",
    "UNAVAILABLE": "OVERLOADED QUEUE_TIME_EXCEEDED DRAINING STARTING RECOVERING WORKER_LOST DRAIN_TIMEOUT SCHEDULER_LOST",
    "DEADLINE_EXCEEDED": "DEADLINE_UNREACHABLE DEADLINE_PASSED",
    "CANCELLED": "BY_CLIENT BY_API BY_ADMIN",
    "INTERNAL": "NUMERIC_FAULT POISON_REQUEST CONSTRAINT_TIMEOUT BUG",
}
USAGE = Usage(3, 0, 2, 0, 1, 2, 3, 0, 0)
FRONTEND = Path(errors.__file__).parent


def details(refusal: Refusal) -> dict[str, object]:
    found = {}
    for packed in refusal.status().details:
        detail = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])()
        assert packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


def test_the_table_is_the_closed_set_of_reasons() -> None:
    listed = {reason: code for code, reasons in TABLE.items() for reason in reasons.split()}
    assert listed == {reason.name: reason.code.name for reason in Reason}


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name)
def test_a_reason_carries_its_details_and_nothing_inner(reason: Reason) -> None:
    refusal = Refusal(reason, metadata={"request_id": "r"})
    found = details(refusal)
    info = found["ErrorInfo"]
    assert (info.reason, info.domain, dict(info.metadata)) == (reason.name, "pagecast", {"request_id": "r"})  # type: ignore[attr-defined]
    advises = reason.code is grpc.StatusCode.UNAVAILABLE or reason.name.startswith("QUOTA_")
    pushback = dict(refusal.trailers()).get("grpc-retry-pushback-ms")
    assert ("RetryInfo" in found) == (pushback is not None) == advises
    if advises:
        assert found["RetryInfo"].retry_delay.ToMilliseconds() == int(pushback or 0) > 0  # type: ignore[attr-defined]
    assert refusal.text() and not re.search(r"[A-Z][a-z]+Error|Traceback|/", refusal.text())


def test_every_reason_is_said_somewhere() -> None:
    """By name in the front end's sources, outside of its definition and of the lists that only group reasons."""
    said = set()
    for path in FRONTEND.rglob("*.py"):
        tree = ast.parse(path.read_text())
        groups = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_RETRYABLE"]
        grouped = {id(n) for group in groups for n in ast.walk(group)}
        said |= {
            n.attr for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "Reason" and id(n) not in grouped
        }  # fmt: skip
    assert {reason.name for reason in Reason} - said == set()


@pytest.mark.parametrize("reason", list(RejectReason), ids=lambda reason: reason.name)
def test_every_refusal_of_the_scheduler_becomes_a_row(reason: RejectReason) -> None:
    refusal = of_rejected(Rejected(1, reason, "max_output_tokens", 10, 12, 700))
    found = details(refusal)
    assert refusal.reason is OF_REJECT[reason]
    if refusal.reason.code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = found["BadRequest"].field_violations[0]  # type: ignore[attr-defined]
        assert violation.field == "spec.stopping.max_output_tokens" and "12" in violation.description and "10" in violation.description
    if refusal.reason.code is grpc.StatusCode.UNAVAILABLE:
        assert dict(refusal.trailers())["grpc-retry-pushback-ms"] == "700"


@pytest.mark.parametrize("reason", list(OF_FINISH), ids=lambda reason: reason.name)
def test_every_bad_end_becomes_a_row(reason: FinishReason) -> None:
    assert of_finished(Finished(1, 0, reason, USAGE), False).reason is OF_FINISH[reason]


def test_a_constraint_that_takes_too_long_is_no_fault_of_the_field() -> None:
    end = Finished(1, 0, FinishReason.CONSTRAINT_FAILED, USAGE, constraint_fault=ConstraintFault.TIMED_OUT)
    assert of_finished(end, True).reason is Reason.CONSTRAINT_TIMEOUT
