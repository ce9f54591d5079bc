"""A tiny model of the plan link: loss, duplication, reordering and delay, repaired by the step-gap protocol.

The rules are the engine's: plans of an epoch are numbered from 1 without a hole; a worker executes step last + 1 only, answers a later
one with PlanGap and drops it, ignores an earlier one and everything of another epoch. The sender keeps each plan until its result is
there and sends again from last_step + 1 on a gap, or when a heartbeat shows that the worker has stood still.
"""

from collections import OrderedDict
from random import Random

from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import PlanGap


class PlanSender:
    """The scheduler's end: remembers plans without a result."""

    def __init__(self) -> None:
        self.start: StartEpoch | None = None
        self.unanswered: OrderedDict[int, StepPlan] = OrderedDict()
        self._last_heartbeat = -1

    def open(self, start: StartEpoch) -> None:
        """A new epoch begins: whatever was under way belongs to the old one."""
        self.start = start
        self.unanswered.clear()
        self._last_heartbeat = -1

    def sent(self, plan: StepPlan) -> None:
        self.unanswered[plan.step] = plan

    def answered(self, epoch: int, step: int) -> None:
        if self.start is not None and epoch == self.start.epoch:
            self.unanswered.pop(step, None)

    def on_gap(self, gap: PlanGap) -> list[StepPlan]:
        """Plans to send again after a gap."""
        if self.start is None or gap.epoch != self.start.epoch:
            return []
        return [plan for step, plan in self.unanswered.items() if step > gap.last_step]

    def on_heartbeat(self, epoch: int, last_step: int) -> list[StepPlan]:
        """Plans to send again because two heartbeats in a row named the same step while plans lie unanswered."""
        if self.start is None or epoch != self.start.epoch:
            return []
        stood_still, self._last_heartbeat = last_step == self._last_heartbeat, last_step
        return [plan for step, plan in self.unanswered.items() if step > last_step] if stood_still else []


class PlanReceiver:
    """The worker's end: lets each step through once and in order."""

    def __init__(self) -> None:
        self.epoch = 0
        self.last_step = 0

    def open(self, start: StartEpoch) -> bool:
        """Whether this StartEpoch begins a newer epoch."""
        if start.epoch <= self.epoch:
            return False
        self.epoch, self.last_step = start.epoch, 0
        return True

    def receive(self, plan: StepPlan) -> StepPlan | PlanGap | None:
        """The plan if it is next, a gap to report, or None for what must be ignored."""
        if plan.epoch != self.epoch or plan.step <= self.last_step:
            return None
        if plan.step != self.last_step + 1:
            return PlanGap(epoch=self.epoch, rank=0, last_step=self.last_step)
        self.last_step = plan.step
        return plan


class Weather:
    """What a frame meets on its way: for each frame the delays in microseconds of the copies that arrive (none: lost)."""

    def __init__(self, random: Random, latency_us: int, jitter_us: int, loss: float, duplication: float) -> None:
        self._random, self._latency, self._jitter, self._loss, self._duplication = random, latency_us, jitter_us, loss, duplication

    def arrivals(self, lossless: bool = False) -> list[int]:
        """Jitter larger than the spacing of frames reorders them."""
        random = self._random
        if not lossless and self._loss and random.random() < self._loss:
            return []
        copies = 2 if self._duplication and random.random() < self._duplication else 1
        return [self._latency + (random.randrange(self._jitter) if self._jitter else 0) for _ in range(copies)]
