"""What front ends ask the scheduler beside submitting requests: about requests of any front end, and on behalf of operators.

Every question gets exactly one answer, with its ticket.
"""

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from pagecast_scheduler.core import invariants
from pagecast_scheduler.core.request import NEVER, Request
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.core.waiting import Wait
from pagecast_scheduler.engine.directory import Directory, Entry
from pagecast_scheduler.engine.epochs import Epochs
from pagecast_scheduler.engine.intake import Intake
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.workers import WorkerGroup
from pagecast_wire import log_lines
from pagecast_wire.control import (
    LOG_LEVELS,
    Audit,
    AuditReport,
    CancelReport,
    CancelRequests,
    Done,
    ListRequests,
    LogLevelSet,
    NotNow,
    RequestList,
    RequestReport,
    ResetPrefixCache,
    RestartWorkers,
    SetDrain,
    SetLogLevel,
    WaitCause,
    WorkersEnded,
)
from pagecast_wire.intake import Phase
from pagecast_wire.sampling import FinishReason

QUESTIONS = (CancelRequests, ListRequests, SetDrain, ResetPrefixCache, RestartWorkers, SetLogLevel, Audit)


class Questions:
    """Answers questions between two turns of the core."""

    def __init__(self, epochs: Epochs, group: WorkerGroup, intake: Intake, directory: Directory) -> None:
        self._log = logger("questions")
        self._group = group
        self._epochs = epochs
        self._intake = intake
        self._directory = directory

    def answer(self, question: Any, now: int) -> msgspec.Struct:
        """The answer to one question."""
        core = self._epochs.core
        if isinstance(question, SetLogLevel):
            return self._set_log_level(question)
        if core is None or self._intake.is_holding:
            return NotNow(question.ticket)
        match question:
            case CancelRequests():
                return self._cancel(question, now)
            case ListRequests():
                return self._list(core, question, now)
            case SetDrain(ticket=ticket, draining=draining, announce_ms=announce_ms):
                self._intake.refuse_from = now + announce_ms * 1000 if draining else None
                self._log.info("drain" if draining else "undrain", announce_ms=announce_ms)
                return Done(ticket, len(core.requests()))
            case ResetPrefixCache(ticket=ticket):
                self._epochs.note(now, "reset_prefix_cache", {})
                return Done(ticket, core.reset_prefix_cache())
            case RestartWorkers(ticket=ticket):
                return WorkersEnded(ticket, self._epochs.restart(now), len(core.requests()))
            case Audit(ticket=ticket):
                return self._audit(core, ticket)
        raise TypeError(type(question).__name__)

    def _set_log_level(self, question: SetLogLevel) -> LogLevelSet:
        """Here and in every worker at once; front ends read it in the next status. A level that is none changes nothing."""
        previous = self._group.log_level
        if question.level not in LOG_LEVELS:
            return LogLevelSet(question.ticket, previous)
        log_lines.set_level(question.level or self._group.config.log_level)
        self._group.set_log_level(question.level)
        self._log.info("log level", level=question.level or "as configured")
        return LogLevelSet(question.ticket, previous)

    def _cancel(self, question: CancelRequests, now: int) -> CancelReport:
        reason = FinishReason.CANCELLED_BY_ADMIN if question.every_owner else FinishReason.CANCELLED_BY_API
        live, ended = [], []
        for entry in self._named(question):
            (live if entry.request is not None else ended).append(entry.name[1])
            if entry.request is not None:
                self._intake.cancel(entry.key, reason, now)
        return CancelReport(question.ticket, tuple(live), tuple(ended))

    def _audit(self, core: Scheduler, ticket: int) -> AuditReport:
        began, violation = time.perf_counter(), ""
        try:
            invariants.check(core)
        except invariants.InvariantError as error:
            violation = str(error)
            self._log.error("a law of the scheduler does not hold", violation=violation)
        stats = core.stats()
        clean = stats.num_blocks - stats.num_blocks_cached - stats.num_blocks_referenced
        elapsed_us = int((time.perf_counter() - began) * 1e6)
        return AuditReport(
            ticket, violation, stats.num_blocks, clean, stats.num_blocks_cached, stats.num_blocks_referenced, len(core.requests()),
            stats.num_running, elapsed_us,
        )  # fmt: skip

    def _list(self, core: Scheduler, question: ListRequests, now: int) -> RequestList:
        every = core.requests()
        page = [request for request in every if request.order > question.after][: question.limit]
        waits = core.explain(now)
        reports = tuple(self._report(core, request, waits[request.key], now) for request in page)
        more = bool(page) and page[-1].order < every[-1].order
        return RequestList(question.ticket, reports, page[-1].order if more else -1, len(every))

    def _report(self, core: Scheduler, request: Request, wait: Wait, now: int) -> RequestReport:
        entry = self._directory.of_key(request.key)
        identity, sequences = request.submit.identity, request.sequences
        computed = [core.computed_tokens(seq) for seq in sequences]
        served, least = core.tenant_tokens(request)
        cause = wait.cause
        if cause is not WaitCause.PAUSED and not self._group.is_open:
            cause = WaitCause.NO_WORKERS
        return RequestReport(
            request_id=identity.request_id, owner=identity.owner, tenant=request.submit.tenant, priority=request.priority,
            phase=_phase(cause, max(computed), request), cause=cause, age_ms=(now - request.arrival) // 1000,
            deadline_ms=-1 if request.deadline >= NEVER else max(0, request.deadline - now) // 1000, num_sequences=len(sequences),
            prompt_tokens=request.num_prompt_tokens, computed_tokens=max(computed),
            output_tokens=sum(len(column) // 4 for column in core.outputs_of(request)), blocks_held=core.blocks_held(request),
            blocks_needed=wait.blocks_needed, blocks_free=wait.blocks_free, queue_position=wait.ahead,
            num_preemptions=sum(seq.num_preemptions for seq in sequences), num_recoveries=max(seq.num_recoveries for seq in sequences),
            num_readers=1 if entry is None else len(entry.readers), tenant_served_tokens=served, least_served_tokens=least, lane=wait.lane,
            labels=identity.labels,
        )  # fmt: skip

    def _named(self, question: CancelRequests) -> Iterable[Entry]:
        if question.every_owner and not question.request_ids:
            return self._directory.live()
        if question.every_owner:
            wanted = set(question.request_ids)
            return [entry for entry in self._directory.all() if entry.name[1] in wanted]
        found = [self._directory.find(question.owner, request_id) for request_id in question.request_ids]
        return [entry for entry in found if entry is not None]


def _phase(cause: WaitCause, computed: int, request: Request) -> Phase:
    if cause is WaitCause.PAUSED:
        return Phase.PAUSED_SLOW_CONSUMER
    if cause is WaitCause.NO_WORKERS and request.started:
        return Phase.RECOVERING
    if cause is not WaitCause.NONE:
        return Phase.QUEUED
    return Phase.PREFILLING if computed < request.num_prompt_tokens else Phase.DECODING
