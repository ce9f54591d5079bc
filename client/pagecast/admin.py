"""What an operator may ask of a replica: `Client(...).admin` and `AsyncClient(...).admin`.

AdminService is on the operators' listeners alone: the socket admin-<index>.sock in the run directory, or the port of --admin-port. What it
says and does holds for the whole replica.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagecast import types
from pagecast.answers import PHASES, PRIORITIES, seconds
from pagecast.requests import duration
from pagecast.v1 import admin_pb2 as pb
from pagecast.v1 import admin_pb2_grpc

WaitCause = Literal[
    "next", "behind", "blocks", "rows", "step_full", "batch_delay", "paused", "isolation", "no_workers", "sibling", "paced",
    "unspecified",
]
LogLevel = Literal["", "debug", "info", "warning", "error"]
"""How much a process logs; "" is what it was configured with."""

_PAGE = 1000
_CAUSES: dict[int, WaitCause] = {
    1: "next", 2: "behind", 3: "blocks", 4: "rows", 5: "step_full", 6: "batch_delay", 7: "paused", 8: "isolation", 9: "no_workers",
    10: "sibling", 11: "paced",
}  # fmt: skip
LOG_LEVELS: tuple[LogLevel, ...] = ("", "debug", "info", "warning", "error")
"""By their number in the API."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a request is not running. blocks_needed, blocks_free: to go on now. explanation: one sentence for a person."""

    cause: WaitCause
    queue_position: int
    blocks_needed: int
    blocks_free: int
    tenant_served_tokens: int
    least_served_tokens: int
    overdue: bool
    explanation: str


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One open request as an operator sees it. age, deadline: seconds; deadline None: none. num_readers 0: it waits to be resumed.
    waiting: None while it runs."""

    request_id: str
    tenant: str
    priority: types.Priority
    phase: types.Phase
    age: float
    deadline: float | None
    num_sequences: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks_held: int
    num_preemptions: int
    num_recoveries: int
    num_readers: int
    waiting: Waiting | None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CancelReport:
    """Request ids by what became of them: ended now, ended before, not known."""

    cancelled: tuple[str, ...]
    finished: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartReport:
    """num_ranks: worker processes that were ended, 0 if none were up. num_requests: open requests, which go on in new ones."""

    num_ranks: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class InvariantsReport:
    """Whether every law of the scheduler holds. violation: the first that does not. Blocks by state add up to num_blocks. elapsed: in
    seconds."""

    ok: bool
    violation: str
    num_blocks: int
    num_clean: int
    num_cached: int
    num_referenced: int
    num_requests: int
    num_running: int
    elapsed: float


def drain_request(announce: float | None) -> pb.DrainRequest:
    """announce: seconds, None for what the server is configured with. Raises ValueError for what is no number of seconds."""
    return pb.DrainRequest(announce=None if announce is None else duration("announce", announce))


def log_level_request(level: LogLevel) -> pb.SetLogLevelRequest:
    """Raises ValueError for a level that there is not."""
    if level not in LOG_LEVELS:
        raise ValueError(f"level must be one of {', '.join(name for name in LOG_LEVELS if name)}, or empty, not {level!r}")
    return pb.SetLogLevelRequest(level=LOG_LEVELS.index(level))  # type: ignore[arg-type]


def log_level(message: pb.SetLogLevelResponse) -> LogLevel:
    """The level that held before; "" where it was none that this version knows."""
    return LOG_LEVELS[message.previous] if message.previous < len(LOG_LEVELS) else ""


def open_request(message: pb.RequestInfo) -> OpenRequest:
    """One open request."""
    return OpenRequest(
        message.request_id, message.tenant, PRIORITIES.get(message.priority, "unspecified"), PHASES.get(message.phase, "unspecified"),
        seconds(message.age), seconds(message.deadline) if message.HasField("deadline") else None, message.num_sequences,
        message.prompt_tokens, message.computed_tokens, message.output_tokens, message.blocks_held, message.num_preemptions,
        message.num_recoveries, message.num_readers, _waiting(message.waiting) if message.HasField("waiting") else None,
        dict(message.labels),
    )


def _waiting(message: pb.Waiting) -> Waiting:
    return Waiting(
        _CAUSES.get(message.cause, "unspecified"), message.queue_position, message.blocks_needed, message.blocks_free,
        message.tenant_served_tokens, message.least_served_tokens, message.overdue, message.explanation,
    )


def cancel_report(message: pb.CancelRequestsResponse) -> CancelReport:
    """Ids of requests that were ended, that had ended before, and that nobody knows."""
    return CancelReport(
        tuple(message.cancelled_request_ids), tuple(message.finished_request_ids), tuple(message.unknown_request_ids)
    )


def invariants(message: pb.CheckInvariantsResponse) -> InvariantsReport:
    """What an audit of the scheduler found."""
    return InvariantsReport(
        message.ok, message.violation, message.num_blocks, message.num_clean, message.num_cached, message.num_referenced,
        message.num_requests, message.num_running, seconds(message.elapsed),
    )


class Admin:
    """For programs without an event loop. Every method takes `timeout` seconds and raises an RpcError of pagecast.errors."""

    def __init__(self, grpc_channel: Any, ask: Callable[..., Any]) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(grpc_channel)
        self._ask = ask

    def drain(self, announce: float | None = None, *, timeout: float | None = None) -> int:
        """No new requests: NOT_SERVING at once, refusals after `announce` seconds (None: as the server is configured). Running ones go
        on. Returns how many are open."""
        return int(self._ask(self._stub.Drain, drain_request(announce), timeout).num_open)

    def undrain(self, *, timeout: float | None = None) -> int:
        """Take requests again. Returns how many are open."""
        return int(self._ask(self._stub.Undrain, pb.UndrainRequest(), timeout).num_open)

    def requests(self, *, timeout: float | None = None) -> Iterator[OpenRequest]:
        """Open requests, oldest first, each with why it waits; asked for page by page."""
        token = ""
        while True:
            page = self._ask(self._stub.ListRequests, pb.ListRequestsRequest(page_size=_PAGE, page_token=token), timeout)
            yield from map(open_request, page.requests)
            token = page.next_page_token
            if not token:
                return

    def cancel(self, request_ids: Sequence[str] = (), *, all: bool = False, timeout: float | None = None) -> CancelReport:
        """End these requests, whoever they belong to, or all of them."""
        request = pb.CancelRequestsRequest(request_ids=request_ids, all=all)
        return cancel_report(self._ask(self._stub.CancelRequests, request, timeout))

    def reset_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget every cached block. Returns how many there were."""
        return int(self._ask(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest(), timeout).num_blocks)

    def restart_workers(self, *, timeout: float | None = None) -> RestartReport:
        """New worker processes; running requests wait for them and go on where they were."""
        told = self._ask(self._stub.RestartWorkers, pb.RestartWorkersRequest(), timeout)
        return RestartReport(told.num_ranks, told.num_requests)

    def check_invariants(self, *, timeout: float | None = None) -> InvariantsReport:
        """Whether every law of the scheduler holds at this moment, and its blocks by state."""
        return invariants(self._ask(self._stub.CheckInvariants, pb.CheckInvariantsRequest(), timeout))

    def set_log_level(self, level: LogLevel, *, timeout: float | None = None) -> LogLevel:
        """How much every process logs from now on; "" for what each was configured with. Returns what held before."""
        return log_level(self._ask(self._stub.SetLogLevel, log_level_request(level), timeout))


class AsyncAdmin:
    """The same for an event loop."""

    def __init__(self, grpc_channel: Any, ask: Callable[..., Awaitable[Any]]) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(grpc_channel)
        self._ask = ask

    async def drain(self, announce: float | None = None, *, timeout: float | None = None) -> int:
        """No new requests: NOT_SERVING at once, refusals after `announce` seconds (None: as the server is configured). Running ones go
        on. Returns how many are open."""
        return int((await self._ask(self._stub.Drain, drain_request(announce), timeout)).num_open)

    async def undrain(self, *, timeout: float | None = None) -> int:
        """Take requests again. Returns how many are open."""
        return int((await self._ask(self._stub.Undrain, pb.UndrainRequest(), timeout)).num_open)

    async def requests(self, *, timeout: float | None = None) -> AsyncIterator[OpenRequest]:
        """Open requests, oldest first, each with why it waits; asked for page by page."""
        token = ""
        while True:
            page = await self._ask(self._stub.ListRequests, pb.ListRequestsRequest(page_size=_PAGE, page_token=token), timeout)
            for info in page.requests:
                yield open_request(info)
            token = page.next_page_token
            if not token:
                return

    async def cancel(self, request_ids: Sequence[str] = (), *, all: bool = False, timeout: float | None = None) -> CancelReport:
        """End these requests, whoever they belong to, or all of them."""
        request = pb.CancelRequestsRequest(request_ids=request_ids, all=all)
        return cancel_report(await self._ask(self._stub.CancelRequests, request, timeout))

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> int:
        """Forget every cached block. Returns how many there were."""
        return int((await self._ask(self._stub.ResetPrefixCache, pb.ResetPrefixCacheRequest(), timeout)).num_blocks)

    async def restart_workers(self, *, timeout: float | None = None) -> RestartReport:
        """New worker processes; running requests wait for them and go on where they were."""
        told = await self._ask(self._stub.RestartWorkers, pb.RestartWorkersRequest(), timeout)
        return RestartReport(told.num_ranks, told.num_requests)

    async def check_invariants(self, *, timeout: float | None = None) -> InvariantsReport:
        """Whether every law of the scheduler holds at this moment, and its blocks by state."""
        return invariants(await self._ask(self._stub.CheckInvariants, pb.CheckInvariantsRequest(), timeout))

    async def set_log_level(self, level: LogLevel, *, timeout: float | None = None) -> LogLevel:
        """How much every process logs from now on; "" for what each was configured with. Returns what held before."""
        return log_level(await self._ask(self._stub.SetLogLevel, log_level_request(level), timeout))
