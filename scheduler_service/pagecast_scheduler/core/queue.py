"""The waiting queue: who is next.

Order: priority class (ageing included), preempted and recovered sequences first within it, then the tenant least served so far, then the
nearest deadline (the least slack; of the class BATCH that of its start, so that without deadlines the longest outputs begin first and
none is left over at the end), then arrival. After waiting (class + 1) * ageing_us a sequence enters the *overdue* lane, which comes
before every class and is served strictly by arrival.

A patient one stays in its class until then, and enters the *patient* lane instead: that and the classes above BATCH take turns, one
admission each, but nobody there goes before one of the overdue lane that arrived earlier. So a list of thousands keeps no urgent request
waiting for more than one of it. Within the lane an output counts TOKEN_US a token, and time since arrival counts against that: the
longest begin first, and who has waited long enough begins whatever its length. When its limit comes near, a patient one goes on to the
overdue lane.

Starvation bound: from then on only sequences that arrived earlier, and at most max_head_passes smaller ones that slip past it while
it does not fit, are admitted before it. In the patient lane these are sequences that arrived no more than max_model_len * TOKEN_US
later, and one of the others for each of them. All are bounded by what was accepted until then, each of those by its max_tokens, so
the wait is finite whatever arrives later.
"""

import heapq
from collections import deque

from pagecast_scheduler.core.backlog import Backlog
from pagecast_scheduler.core.request import NEVER, PATIENT_US, Sequence
from pagecast_scheduler.core.tenants import Tenants
from pagecast_wire.intake import Priority

OVERDUE, PATIENT = -2, -1
_LANES = (OVERDUE, PATIENT, 0, 1, 2)
_Entry = tuple[int, int, int, Sequence]  # (due or 0, order, ticket, sequence); tickets are unique, so sequences never compare


class WaitingQueue:
    """Heaps per lane and tenant with lazy deletion: an entry counts only while its ticket is its sequence's current one.

    backlog: the members that were in no hurry when they came. Whether anybody is by now, is_hurried tells. paced_at: when they were last
    put off though there was room for all: until then they do not age, or they would all come before one in a hurry that arrives; but
    whoever has waited for PATIENT_US ages whatever happens."""

    def __init__(self, tenants: Tenants, ageing_us: int, max_model_len: int) -> None:
        self.backlog = Backlog(max_model_len)
        self._tenants = tenants
        self._ageing_us = ageing_us
        self._first: dict[int, list[_Entry]] = {lane: [] for lane in _LANES}
        self._by_tenant: dict[int, dict[int, list[_Entry]]] = {lane: {} for lane in _LANES}
        self._promotions: list[tuple[int, int, Sequence]] = []
        self._limits: list[tuple[int, int, Sequence]] = []  # of the backlog; an entry counts while its sequence is queued
        self.paced_at = -NEVER
        self._others_turn = False  # the last one admitted came from the patient lane
        self._tickets = 0
        self._size = 0
        self._num_dead = 0  # removals since the last sweep; each may have left entries behind

    def __len__(self) -> int:
        return self._size

    def is_hurried(self, now: int) -> bool:
        """Whether any member is not to wait longer than it must."""
        while self._limits and not self._limits[0][2].queued:
            heapq.heappop(self._limits)
        near = bool(self._limits) and self._limits[0][0] - now < PATIENT_US
        return near or self._size > self.backlog.num_sequences

    def push(self, seq: Sequence, now: int) -> None:
        """Enter by what the sequence is owed: its class less one for every ageing_us since its arrival."""
        assert not seq.queued
        seq.queued = True
        self._size += 1
        if seq.request.is_patient:
            self.backlog.add(seq)
        lane = seq.request.priority - (now - seq.request.arrival) // self._ageing_us
        self._enter(seq, seq.request.priority if seq.request.is_patient and lane >= 0 else lane, now)
        if seq.request.is_patient and seq.request.first_limit < NEVER:
            heapq.heappush(self._limits, (seq.request.first_limit, seq.ticket, seq))

    def admit(self, seq: Sequence) -> None:
        """Leave the queue to run."""
        self._others_turn = seq.lane == PATIENT
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Leave the queue; the heap entries die with the ticket."""
        assert seq.queued
        seq.queued = False
        seq.ticket = 0
        self._size -= 1
        if seq.request.is_patient:
            self.backlog.add(seq, -1)
        self._num_dead += 1
        if self._num_dead > 256 + self._size:
            self._sweep()

    def take(self, now: int) -> Sequence | None:
        """The sequence to admit next. It stays a member: the caller ends that with `admit` or `remove`, or takes it back with
        `put_back`."""
        self._promote(now)
        for lane in self._lanes_in_turn():
            if _top(self._first[lane]) is not None:
                return heapq.heappop(self._first[lane])[3]
            tenant = self._least_served(lane) if self._by_tenant[lane] else None
            if tenant is not None:
                return heapq.heappop(self._by_tenant[lane][tenant])[3]
        return None

    def put_back(self, seq: Sequence) -> None:
        """A taken sequence could not be admitted: it waits where it was."""
        heap, entry = self._place(seq)
        heapq.heappush(heap, entry)

    def tokens_ahead(self, count: int, enough: int, now: int) -> int:
        """Tokens of the sequences that would be admitted next: of `count` of them, or of as many as have `enough`."""
        taken: list[Sequence] = []
        total, others_turn = 0, self._others_turn
        while len(taken) < count and total < enough and (seq := self.take(now)) is not None:
            taken.append(seq)
            total += seq.num_tokens
            self._others_turn = seq.lane == PATIENT
        for seq in taken:
            self.put_back(seq)
        self._others_turn = others_turn
        return total

    def waiting(self) -> list[Sequence]:
        """Everyone in the queue, in about the order of admission. Costs a sort: for reports, not for steps."""
        entries = [(lane, 0, 0, e) for lane in _LANES for e in self._first[lane]]
        entries += [
            (lane, 1, int(self._tenants.served[tenant]), e)
            for lane in _LANES
            for tenant, heap in self._by_tenant[lane].items()
            for e in heap
        ]
        live = [entry for entry in entries if entry[3][3].ticket == entry[3][2]]
        live.sort(key=lambda entry: (*entry[:3], *entry[3][:3]))
        return self._in_turn([entry[3][3] for entry in live])

    def _in_turn(self, waiting: list[Sequence]) -> list[Sequence]:
        """Those of the patient lane and of the classes above BATCH take turns."""
        patient = deque(seq for seq in waiting if seq.lane == PATIENT)
        others = deque(seq for seq in waiting if seq.lane != PATIENT and seq.lane < Priority.BATCH)
        merged: list[Sequence] = []
        others_turn = self._others_turn
        while patient and others:
            earlier = others[0].lane == OVERDUE and others[0].request.order < patient[0].request.order
            merged.append(others.popleft() if others_turn or earlier else patient.popleft())
            others_turn = merged[-1].lane == PATIENT
        return [*merged, *patient, *others, *(seq for seq in waiting if seq.lane == Priority.BATCH)]

    def _lanes_in_turn(self) -> tuple[int, ...]:
        """All lanes, from where the next one is to be admitted first."""
        if self._others_turn:
            return OVERDUE, 0, 1, PATIENT, 2
        overdue, patient = _top(self._first[OVERDUE]), _top(self._first[PATIENT])
        if overdue is not None and patient is not None and patient[1] < overdue[1]:
            return PATIENT, OVERDUE, 0, 1, 2
        return _LANES

    def _enter(self, seq: Sequence, lane: int, now: int) -> None:
        """lane: any below 0 where it is overdue."""
        request = seq.request
        if lane < 0:
            lane = OVERDUE if seq.resumed or request.is_hurried(now) else PATIENT
        self._tickets += 1
        seq.ticket, seq.lane = self._tickets, lane
        self.put_back(seq)
        if lane >= 0:
            steps = request.priority - (0 if request.is_patient else lane) + 1
            heapq.heappush(self._promotions, (request.arrival + steps * self._ageing_us, seq.ticket, seq))
        elif lane == PATIENT and request.first_limit < NEVER:
            heapq.heappush(self._promotions, (request.first_limit - PATIENT_US + 1, seq.ticket, seq))

    def _place(self, seq: Sequence) -> tuple[list[_Entry], _Entry]:
        request = seq.request
        if seq.lane == PATIENT:
            return self._first[PATIENT], (request.patient_order, request.order, seq.ticket, seq)
        if seq.lane == OVERDUE or seq.resumed:
            return self._first[seq.lane], (0, request.order, seq.ticket, seq)
        return self._by_tenant[seq.lane].setdefault(request.tenant, []), (request.due, request.order, seq.ticket, seq)

    def _sweep(self) -> None:
        """Drop all dead entries, so that memory follows the number of members."""
        self._num_dead = 0
        self._promotions = [entry for entry in self._promotions if entry[2].ticket == entry[1]]
        heapq.heapify(self._promotions)
        self._limits = list({id(entry[2]): entry for entry in self._limits if entry[2].queued}.values())
        heapq.heapify(self._limits)
        for heap in [*self._first.values(), *(heap for heaps in self._by_tenant.values() for heap in heaps.values())]:
            heap[:] = [entry for entry in heap if entry[3].ticket == entry[2]]
            heapq.heapify(heap)

    def _promote(self, now: int) -> None:
        while self._promotions and self._promotions[0][0] <= now:
            _, ticket, seq = heapq.heappop(self._promotions)
            if seq.ticket != ticket:
                continue
            if (later := self._ages_at(seq)) > now:
                heapq.heappush(self._promotions, (later, ticket, seq))
            else:
                self._enter(seq, OVERDUE if seq.request.is_patient else seq.lane - 1, now)

    def _ages_at(self, seq: Sequence) -> int:
        """The earliest time for its next class by what it was put off."""
        if seq.lane == PATIENT or not seq.request.is_patient:
            return 0
        return min(self.paced_at, seq.request.arrival + PATIENT_US) + self._ageing_us

    def _least_served(self, lane: int) -> int | None:
        """The tenant whose head is next in the lane."""
        best: tuple[int, _Entry, int] | None = None
        heaps = self._by_tenant[lane]
        for tenant in list(heaps):
            entry = _top(heaps[tenant])
            if entry is None:
                del heaps[tenant]
                continue
            key = (int(self._tenants.served[tenant]), entry, tenant)
            if best is None or key < best:
                best = key
        return None if best is None else best[2]


def _top(heap: list[_Entry]) -> _Entry | None:
    """First live entry; dead ones before it are dropped."""
    while heap and heap[0][3].ticket != heap[0][2]:
        heapq.heappop(heap)
    return heap[0] if heap else None
