"""Every error that a caller of this package can meet, and how a gRPC status becomes one. Knows grpc only by the objects handed in."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

NO_CONNECTION = "no connection to "
"""How the message of an Unavailable begins where a client's call found no server."""


class PagecastError(Exception):
    """Root of this package's errors. str() is one line that names what is wrong. exit_code: how a command ends over it."""

    exit_code = 1


class ModelNotFound(PagecastError):
    """A model name or path that means nothing here."""

    exit_code = 2


class ModelUnreadable(PagecastError):
    """A model whose files this process may not read."""

    exit_code = 2


class HubError(PagecastError):
    """A model that could not be fetched from a hub."""

    exit_code = 2


class StartError(PagecastError):
    """A cluster that did not come up. exit_code is 2 where starting it again as it is cannot help."""

    def __init__(self, line: str, exit_code: int = 1) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class WrongAccess(PagecastError, ValueError):
    """Where a server is and how to get in: what names no server, does not go together or cannot be read."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that the server refused: its path in the request, and why."""

    field: str
    description: str


class RpcError(PagecastError):
    """A call that the server, or the way to it, ended with a status other than OK.

    code: the gRPC status name, e.g. "UNAVAILABLE". reason: Pagecast's own reason, e.g. "OVERLOADED"; empty if the error is not
    the server's. retry_after: seconds to wait before a retry, None if the server did not say. metadata: the reason's details,
    such as request_id and emitted_tokens.
    """

    def __init__(
        self, code: str, message: str, reason: str = "", metadata: dict[str, str] | None = None,
        violations: Sequence[FieldViolation] = (), retry_after: float | None = None,
    ) -> None:
        details = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
        super().__init__(f"{message or code.lower()}{f' ({details})' if details and details not in message else ''}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.violations = tuple(violations)
        self.retry_after = retry_after


class InvalidRequest(RpcError):
    """INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION: the request cannot be served as it is; `violations` names the fields."""


class NotFound(RpcError):
    """NOT_FOUND: no such model or request."""


class RequestIdInUse(RpcError):
    """ALREADY_EXISTS: a live request of this caller has that id."""


class Unavailable(RpcError):
    """UNAVAILABLE: not now. Overloaded, starting, draining or unreachable; a retry may succeed after `retry_after`."""


class ResourceExhausted(RpcError):
    """RESOURCE_EXHAUSTED: a quota or size limit; retrying at once does not help."""


class DeadlineExceeded(RpcError):
    """DEADLINE_EXCEEDED: the call's timeout ran out, or could not be met."""


class Cancelled(RpcError):
    """CANCELLED: someone ended the request."""


class Unauthenticated(RpcError):
    """UNAUTHENTICATED or PERMISSION_DENIED: the credentials are missing, out of date, or not enough."""


class InternalError(RpcError):
    """Any other status: a defect in the server, or a server that is none of ours."""


_BY_CODE: dict[str, type[RpcError]] = {
    "INVALID_ARGUMENT": InvalidRequest, "OUT_OF_RANGE": InvalidRequest, "FAILED_PRECONDITION": InvalidRequest, "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": RequestIdInUse, "UNAVAILABLE": Unavailable, "RESOURCE_EXHAUSTED": ResourceExhausted,
    "DEADLINE_EXCEEDED": DeadlineExceeded, "CANCELLED": Cancelled, "UNAUTHENTICATED": Unauthenticated, "PERMISSION_DENIED": Unauthenticated,
}
_UNCONNECTED = "connections to all backends failing"
_HINTS = {
    ("WRONG_VERSION_NUMBER",): "the server speaks no TLS there",
    ("CERTIFICATE_VERIFY_FAILED",): "its certificate is of no authority that this client trusts",
    ("Hostname Verification",): "its certificate is for another name",
    (_UNCONNECTED, "Socket closed"): "a server that wants TLS ends plaintext connections so",
    (_UNCONNECTED, "Connection reset by peer"): "a server that wants TLS ends plaintext connections so",
    (_UNCONNECTED, "%5B::1%5D"): "localhost has two addresses; 127.0.0.1 may say more",
}
"""What words of gRPC and its TLS library, together, mean to those who call."""
_NO_CONNECTION = re.compile(
    r"(?:connections to all backends failing|failed to connect to all addresses); last error: \w+: "
    r"(?:ipv[46]:)?(?P<address>\S+): (?:Failed to connect to remote host: )?(?P<why>.+)"
)
_STATUS_DETAILS = "grpc-status-details-bin"


class FailedCall(Protocol):
    """What grpc.RpcError of the synchronous API and grpc.aio.AioRpcError have in common."""

    def code(self) -> Any: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...


def from_rpc(call: FailedCall) -> RpcError:
    """The typed error for a failed call; its details come from google.rpc.Status in the trailers, where the server sent one."""
    code = call.code().name
    kind = _BY_CODE.get(code, InternalError)
    packed = _trailer(call.trailing_metadata() or (), _STATUS_DETAILS)
    message = call.details() or ""
    if kind is DeadlineExceeded and not packed:
        message = "the call's timeout ran out"  # gRPC's own words, not the server's, name the status and no more
    elif kind is Unavailable and not packed:
        hints = [f" ({hint})" for signs, hint in _HINTS.items() if all(sign in message for sign in signs)]
        message = _NO_CONNECTION.sub(_plainly, message) + "".join(hints[:1])
    return kind(code, message, **(_details(packed) if packed else {}))


def from_status(packed: bytes) -> RpcError:
    """The typed error for a serialized google.rpc.Status, as a request of a call of many ends with; InternalError for what is none."""
    from google.protobuf.message import DecodeError
    from google.rpc import code_pb2, status_pb2

    try:
        status = status_pb2.Status.FromString(packed)
        code = code_pb2.Code.Name(status.code)
    except (DecodeError, ValueError):
        code = "OK"
    if code == "OK":  # says that nothing failed, where a failure is to be told
        return InternalError("UNKNOWN", "the server's status cannot be read")
    return _BY_CODE.get(code, InternalError)(code, status.message, **_details(packed))


def _plainly(said: re.Match[str]) -> str:
    """What gRPC says of a failed connection, without what matters to gRPC alone."""
    return f"{NO_CONNECTION}{unquote(said['address'])}: {said['why']}"


def _trailer(metadata: Iterable[tuple[str, str | bytes]], name: str) -> bytes | None:
    for key, value in metadata:
        if key == name and isinstance(value, bytes):
            return value
    return None


def _details(packed: bytes) -> dict[str, Any]:
    """Keyword arguments of RpcError from a serialized google.rpc.Status; unknown details are passed over."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    found: dict[str, Any] = {}
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(info):
                found["reason"], found["metadata"] = info.reason, dict(info.metadata)
            elif detail.Unpack(bad):
                found["violations"] = [FieldViolation(v.field, v.description) for v in bad.field_violations]
            elif detail.Unpack(retry):
                found["retry_after"] = retry.retry_delay.ToTimedelta().total_seconds()
    except DecodeError:
        return {}
    return found
