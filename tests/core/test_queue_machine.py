"""WaitingQueue against a sort: whoever is taken is first in the stated order at that moment."""

from core.cluster import make_config, make_submit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagecast_scheduler.core import intake
from pagecast_scheduler.core.request import PATIENT_US
from pagecast_scheduler.core.state import State
from pagecast_wire.intake import Priority

AGEING = 1000
FAR_MS = PATIENT_US // 1000 + 2
"""A deadline that is far away for two milliseconds."""


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.state = State.create(make_config(ageing_us=AGEING), 1)
        self.queue, self.tenants = self.state.queue, self.state.tenants
        self.members = []
        self.outputs = {}
        self.others_turn = False
        self.now = 0

    def lane(self, seq):
        request = seq.request
        lane = request.priority - (self.now - request.arrival) // AGEING
        if lane >= 0:
            return request.priority if self.is_patient(seq) else lane
        patient = self.is_patient(seq) and not seq.resumed and request.deadline - self.now >= PATIENT_US
        return -1 if patient else -2

    def is_patient(self, seq):
        return seq.request.priority == Priority.BATCH and seq.request.submit.deadline_ms in (-1, FAR_MS)

    def rank(self, seq):
        request, lane = seq.request, self.lane(seq)
        if lane == -2:
            return (-2, 0, 0, 0, 0, request.order)
        if lane == -1:
            return (-1, 0, 0, request.arrival - self.outputs[request.order] * 10_000, request.order, 0)
        if seq.resumed:
            return (lane, 0, 0, 0, 0, request.order)
        due = request.deadline
        if request.priority == Priority.BATCH:  # ten milliseconds for each token of the output
            due -= self.outputs[request.order] * 10_000
        return (lane, 1, int(self.tenants.served[request.tenant]), due, request.order, 0)

    def first(self):
        patient = min((seq for seq in self.members if self.lane(seq) in (-1, 2)), key=self.rank, default=None)
        other = min((seq for seq in self.members if self.lane(seq) in (-2, 0, 1)), key=self.rank, default=None)
        if patient is None or other is None:
            return patient or other
        earlier = self.lane(other) == -2 and other.request.order < patient.request.order
        return other if self.others_turn or earlier or self.lane(patient) == 2 else patient

    @rule(
        priority=st.integers(0, 2), tenant=st.sampled_from("abc"), deadline=st.sampled_from([-1, 5, 50, FAR_MS]), resumed=st.booleans(),
        output=st.integers(1, 60),
    )
    def push(self, priority, tenant, deadline, resumed, output):
        self.state.orders += 1
        self.outputs[self.state.orders] = output
        submit = make_submit(self.state.orders, [1], output, priority=priority, tenant=tenant, deadline_ms=deadline)
        request = intake.build(self.state, submit, self.now)
        request.tenant = self.tenants.enter(tenant)
        seq = request.sequences[0]
        seq.resumed = resumed
        self.queue.push(seq, self.now)
        self.members.append(seq)

    @precondition(lambda self: self.members)
    @rule()
    def admit(self):
        seq = self.queue.take(self.now)
        assert self.rank(seq) == self.rank(self.first())
        self.others_turn = self.lane(seq) == -1
        self.queue.admit(seq)
        self.members.remove(seq)
        self.tenants.served[seq.request.tenant] += 7

    @precondition(lambda self: self.members)
    @rule()
    def blocked(self):
        seq = self.queue.take(self.now)
        assert self.rank(seq) == self.rank(self.first())
        self.queue.put_back(seq)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def cancel(self, data):
        seq = data.draw(st.sampled_from(self.members))
        self.queue.remove(seq)
        self.members.remove(seq)

    @rule(by=st.sampled_from([1, 400, 1500]))
    def time_passes(self, by):
        self.now += by

    @rule()
    def sweep(self):
        self.queue._sweep()

    @invariant()
    def same_members(self):
        assert len(self.queue) == len(self.members)
        assert sorted(seq.request.order for seq in self.queue.waiting()) == sorted(seq.request.order for seq in self.members)

    @invariant()
    def the_patient_are_told_apart(self):
        patient = [seq for seq in self.members if self.is_patient(seq)]
        assert self.queue.backlog.is_of(patient)
        near = any(seq.request.deadline - self.now < PATIENT_US for seq in patient)
        assert self.queue.is_hurried(self.now) == (near or len(patient) < len(self.members))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_queue_gives_nobody():
    assert State.create(make_config(), 1).queue.take(0) is None


def test_dead_entries_do_not_pile_up():
    machine = QueueMachine()
    for _ in range(2000):
        machine.push(2, "a", FAR_MS, False, 1)
        machine.queue.remove(machine.members.pop())
    entries = [entry for heaps in machine.queue._by_tenant.values() for heap in heaps.values() for entry in heap]
    assert len(entries) + len(machine.queue._promotions) + len(machine.queue._limits) < 1000
