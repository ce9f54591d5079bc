"""AdminService: what an operator asks of the replica. The scheduler answers; here its numbers become messages and words."""

from typing import Any

from pagecast.v1 import admin_pb2 as pb
from pagecast.v1 import admin_pb2_grpc, generation_pb2
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation, field_violation
from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_wire import control
from pagecast_wire.control import RequestReport, WaitCause
from pagecast_wire.intake import Priority

MAX_PAGE = 1000
DEFAULT_PAGE = 100
MAX_IDS = 1000
MAX_ANNOUNCE_S = 3600

_PRIORITIES = {
    Priority.BATCH: generation_pb2.PRIORITY_BATCH,
    Priority.NORMAL: generation_pb2.PRIORITY_NORMAL,
    Priority.INTERACTIVE: generation_pb2.PRIORITY_INTERACTIVE,
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See the proto; every method holds for the replica."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._engine = state.engine

    async def Drain(self, request: Any, context: Any) -> pb.DrainResponse:
        """No new requests after the announcement."""
        found = Findings()
        seconds = found.seconds("announce", request, 0.0, MAX_ANNOUNCE_S, self._state.config.drain_announce_s)
        found.refuse()
        done = await self._engine.ask(control.SetDrain(0, True, round(seconds * 1000)))
        return pb.DrainResponse(num_open=done.count)

    async def Undrain(self, request: Any, context: Any) -> pb.UndrainResponse:
        """Requests are taken again."""
        done = await self._engine.ask(control.SetDrain(0, False, 0))
        return pb.UndrainResponse(num_open=done.count)

    async def ListRequests(self, request: Any, context: Any) -> pb.ListRequestsResponse:
        """One page of open requests, each with why it waits."""
        if request.page_size > MAX_PAGE:
            raise field_violation("page_size", f"must be at most {MAX_PAGE}, not {request.page_size}")
        token = request.page_token or "-1"
        if not token.removeprefix("-").isdecimal() or len(token) > 18:
            raise field_violation("page_token", "must be the next_page_token of an earlier answer")
        told = await self._engine.ask(control.ListRequests(0, request.page_size or DEFAULT_PAGE, int(token)))
        shown = [request_info(report) for report in told.requests]
        following = "" if told.next_after < 0 else str(told.next_after)
        return pb.ListRequestsResponse(requests=shown, next_page_token=following, total_size=told.total)

    async def CancelRequests(self, request: Any, context: Any) -> pb.CancelRequestsResponse:
        """Ends requests by id, or all of them."""
        ids = tuple(dict.fromkeys(request.request_ids))
        if request.all == bool(ids):
            text = "must not be given together with all" if ids else "must hold at least one id unless all is set"
            raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation("request_ids", text),))
        if len(ids) > MAX_IDS:
            raise field_violation("request_ids", f"must be at most {MAX_IDS} ids, not {len(ids)}")
        report = await self._engine.ask(control.CancelRequests(0, ids, every_owner=True))
        known = {*report.cancelled, *report.finished}
        return pb.CancelRequestsResponse(
            cancelled_request_ids=report.cancelled, finished_request_ids=report.finished,
            unknown_request_ids=[request_id for request_id in ids if request_id not in known],
        )

    async def ResetPrefixCache(self, request: Any, context: Any) -> pb.ResetPrefixCacheResponse:
        """Forgets every cached block."""
        done = await self._engine.ask(control.ResetPrefixCache(0))
        return pb.ResetPrefixCacheResponse(num_blocks=done.count)

    async def RestartWorkers(self, request: Any, context: Any) -> pb.RestartWorkersResponse:
        """New worker processes; running requests wait for them."""
        ended = await self._engine.ask(control.RestartWorkers(0))
        return pb.RestartWorkersResponse(num_ranks=ended.num_ranks, num_requests=ended.num_requests)

    async def SetLogLevel(self, request: Any, context: Any) -> pb.SetLogLevelResponse:
        """How much every process logs."""
        if not 0 <= request.level < len(control.LOG_LEVELS):
            raise field_violation("level", f"must be a LogLevel of this server's, not {request.level}")
        told = await self._engine.ask(control.SetLogLevel(0, control.LOG_LEVELS[request.level]))
        previous = control.LOG_LEVELS.index(told.previous)
        return pb.SetLogLevelResponse(previous=previous)

    async def CheckInvariants(self, request: Any, context: Any) -> pb.CheckInvariantsResponse:
        """The scheduler's laws, checked now."""
        report = await self._engine.ask(control.Audit(0))
        answer = pb.CheckInvariantsResponse(
            ok=not report.violation, violation=report.violation, num_blocks=report.num_blocks, num_clean=report.num_clean,
            num_cached=report.num_cached, num_referenced=report.num_referenced, num_requests=report.num_requests,
            num_running=report.num_rows,
        )
        answer.elapsed.FromMicroseconds(report.elapsed_us)
        return answer


def request_info(report: RequestReport) -> pb.RequestInfo:
    """One open request as an operator sees it."""
    info = pb.RequestInfo(
        request_id=report.request_id, tenant=report.tenant, priority=_PRIORITIES[Priority(report.priority)],
        phase=int(report.phase), num_sequences=report.num_sequences, prompt_tokens=report.prompt_tokens,  # type: ignore[arg-type]
        computed_tokens=report.computed_tokens, output_tokens=report.output_tokens, blocks_held=report.blocks_held,
        num_preemptions=report.num_preemptions, num_recoveries=report.num_recoveries, num_readers=report.num_readers,
        labels=dict(report.labels),
    )
    info.age.FromMilliseconds(report.age_ms)
    if report.deadline_ms >= 0:
        info.deadline.FromMilliseconds(report.deadline_ms)
    if report.cause is not WaitCause.NONE:
        waiting = pb.Waiting(
            cause=int(report.cause), queue_position=report.queue_position, blocks_needed=report.blocks_needed,  # type: ignore[arg-type]
            blocks_free=report.blocks_free, tenant_served_tokens=report.tenant_served_tokens,
            least_served_tokens=report.least_served_tokens, overdue=report.lane < 0, explanation=in_words(report),
        )
        info.waiting.CopyFrom(waiting)
    return info


def in_words(report: RequestReport) -> str:
    """Why the request is not running, as one sentence."""
    waited = f"after {report.age_ms / 1000:.1f} s"
    match report.cause:
        case WaitCause.BEHIND:
            share = ""
            if report.tenant_served_tokens > report.least_served_tokens:
                share = f"; its tenant was served {report.tenant_served_tokens} tokens, another only {report.least_served_tokens}"
            return f"{report.queue_position} come before it {waited}{share}"
        case WaitCause.BLOCKS:
            return f"it is next, and needs {report.blocks_needed} free blocks with some in reserve; {report.blocks_free} are free"
        case WaitCause.ROWS:
            return "it is next, and as many sequences run as max_num_seqs allows"
        case WaitCause.STEP_FULL:
            return "it is next, and prompts that began before it fill max_num_batched_tokens"
        case WaitCause.BATCH_DELAY:
            return "a first batch gathers, for batch_delay_ms or until no more of a list of class batch comes"
        case WaitCause.PAUSED:
            return "its client does not read what was sent"
        case WaitCause.ISOLATION:
            return "requests that were present when workers crashed run alone first"
        case WaitCause.NO_WORKERS:
            return "no worker group is up; it goes on when one is"
        case WaitCause.SIBLING:
            return "it shares the prompt that another sequence of the request is computing"
        case WaitCause.PACED:
            return "it is next, of class batch and in no hurry: it may start later and still not be the last to end"
        case _:
            return "nothing is in its way; the next step takes it"
