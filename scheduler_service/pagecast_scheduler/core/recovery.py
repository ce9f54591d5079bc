"""After the loss of a worker group: everybody waits again with the history that was applied, and crashes are traced to requests."""

from enum import IntEnum

from pagecast_scheduler.core.estimates import Estimates
from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.prefix_cache import CLEARED
from pagecast_scheduler.core.request import Request, Status
from pagecast_scheduler.core.state import State
from pagecast_wire.intake import Phase
from pagecast_wire.sampling import FinishReason

SUSPECT_AFTER = 2
"""Crashes in a row after which a request must run alone."""


class Loss(IntEnum):
    """Why a worker group is gone."""

    CRASH = 0
    MEMORY = 1  # a step did not fit the device's memory
    ORDERED = 2  # an operator wanted new processes: nobody is to blame


_FAULT_OF_LOSS = {Loss.CRASH: FinishReason.POISON_REQUEST, Loss.MEMORY: FinishReason.STEP_MEMORY}
"""What a request ends with that was alone when the group was lost."""


def fail_epoch(s: State, now: int, loss: Loss = Loss.CRASH) -> None:
    """epoch += 1 with nothing in flight and an empty pool. A request that cost the group its life alone ends, as `_FAULT_OF_LOSS` says."""
    present = _present(s) if s.in_flight and loss is not Loss.ORDERED else {}
    s.epoch += 1
    s.step = s.applied_step = s.prefilled_in = s.began = 0
    s.in_flight.clear()
    s.totals.num_recoveries += 1
    s.estimates = Estimates()  # the first steps of new workers may be many times slower, and others do not tell of them
    _ask_again(s)
    culprit = s.alone if s.alone is not None and s.alone.key in present else None
    for seq in [*s.rows.running(), *(entry.seq for entry in s.detached.values())]:
        if seq.row >= 0:
            s.leave_row(seq)
        seq.detached = None
        seq.num_recoveries += 1
        seq.status = Status.WAITING
        seq.resumed = True
        s.enqueue(seq, now)
        s.report(seq, Phase.RECOVERING)
    s.detached.clear()
    s.released = []
    is_watched = s.kv.cache.changes is not None
    s.kv = KvManager(s.config)
    if is_watched:
        s.kv.cache.changes = [CLEARED]
    s.alone = None
    if loss is Loss.ORDERED:
        return
    _count_crashes(s, present)
    _end_hopeless(s, culprit, _FAULT_OF_LOSS[loss], now)


def _ask_again(s: State) -> None:
    """New workers have compiled nothing: requests with a constraint leave the queue until they have."""
    s.constraints.forget()
    for request in s.requests.values():
        s.constraints.expect(request)
        if request.preparing:
            for seq in request.sequences:
                if seq.queued:
                    s.queue.remove(seq)


def _present(s: State) -> dict[int, int]:
    """Requests with work in flight: key -> most tokens that any of their sequences was planned to hold."""
    present: dict[int, int] = {}
    for seq in s.rows.running():
        key = seq.request.key
        present[key] = max(present.get(key, 0), int(s.rows.num_planned[seq.row]))
    for entry in s.detached.values():
        present[entry.seq.request.key] = entry.seq.request.max_tokens
    return present


def _count_crashes(s: State, present: dict[int, int]) -> None:
    for request in s.requests.values():
        if request.key not in present:
            if request.key not in s.suspects:
                request.num_crashes = 0
            continue
        request.num_crashes += 1
        request.crash_tokens = present[request.key]
        if request.num_crashes >= SUSPECT_AFTER:
            s.suspects[request.key] = request


def _end_hopeless(s: State, culprit: Request | None, fault: FinishReason, now: int) -> None:
    for request in list(s.requests.values()):
        for seq in request.sequences:
            if seq.status is Status.FINISHED:
                continue
            if request is culprit:
                s.finish(seq, fault, now)
            elif seq.num_recoveries > s.config.max_recoveries:
                s.finish(seq, FinishReason.WORKER_LOST, now)
