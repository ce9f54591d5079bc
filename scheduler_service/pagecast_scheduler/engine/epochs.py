"""The life of the core: made when the first worker group is complete, fed with results, asked for plans, carried from epoch to epoch.

An epoch opens on a complete group and ends when any rank is lost. Whatever ends it, the streams go on from their history in the
next one; nothing that a client sees depends on how many epochs there were.
"""

from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from pagecast_scheduler.core import invariants
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.recovery import Loss
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.core.state import ResultError
from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.preparing import Preparing
from pagecast_scheduler.engine.recovery import SECOND, CrashLoopBrake, StepClock
from pagecast_scheduler.engine.workers import Lost, WorkerGroup
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.intake import KEY_BITS, EngineLimits, FrontendBatch, Priority, Submit
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import ConstraintPrepared, StepResult
from pagecast_wire.sampling import FinishReason, SamplingParams, StopRules

EXIT_FAILED = 1
EXIT_RESTART = 5
"""The scheduler must start anew to go on (the pool changed size under it); front ends bring their requests back."""

ARRIVAL_GAP_US = 2000
"""How long after a request of class BATCH another of the same list is still expected."""

INTERNAL_SLOT = 0
"""Slot of the engine's own requests; front ends get 1 and up."""


class Stop(Exception):
    """The process is to end with this exit code. The text is one line for the operator."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Record(Protocol):
    """What is told everything that enters and leaves the core, in order. error: why it no longer listens; empty while it does."""

    error: str

    def arrival(self, now: int, message: Any) -> None: ...
    def control(self, now: int, name: str, args: dict[str, Any]) -> None: ...
    def plan(self, now: int, plan: StepPlan | None) -> None: ...
    def result(self, now: int, result: StepResult) -> None: ...
    def close(self) -> None: ...


class Epochs:
    """Owns the core and the step clock. `core` and `limits` are None until the first group is complete."""

    def __init__(self, config: EngineConfig, group: WorkerGroup, last_epoch: int, record: Record | None, now: int) -> None:
        """last_epoch: highest epoch that any scheduler before this one opened; 0 if there was none."""
        self._log = logger("engine")
        self._config = config
        self._group = group
        self._record = record
        self._brake = CrashLoopBrake()
        self._reopen_at = now
        self._gathering_since = now
        self._last_progress = now
        self._num_decoding = 0
        self._warm_up_key = INTERNAL_SLOT << KEY_BITS
        self.clock = StepClock(int(config.step_deadline_s * SECOND))
        self.core: Scheduler | None = None
        self.limits: EngineLimits | None = None
        self.epoch = last_epoch
        self.step = 0
        self.device_us = 0  # of all steps of all epochs
        self.has_served = last_epoch > 0
        self.is_warm = False  # a step of this epoch has run
        self.num_epochs = 0
        self._preparing = Preparing()

    def create_core(self, now: int) -> None:
        """The first group is complete: fix the limits that hold from now on and make the core. Raises Stop if none can work."""
        reference = self._group.reference
        assert reference is not None
        self.limits = effective_limits(self._config, self._group.min_blocks, reference.model.max_model_len)
        if self.limits.max_model_len < (self._config.max_model_len or reference.model.max_model_len):
            self._log.warning(
                "max_model_len lowered", max_model_len=self.limits.max_model_len, model=reference.model.max_model_len,
                configured=self._config.max_model_len, num_blocks=self.limits.num_blocks, block_size=self.limits.block_size,
            )  # fmt: skip
        self.epoch = max(self.epoch, self._group.last_epoch) + 1
        core_config = SchedulerConfig(
            block_size=self.limits.block_size, num_blocks=self.limits.num_blocks, max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs, max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_queued_requests=self.limits.max_queued_requests, max_queued_tokens=self.limits.max_queued_tokens,
            enable_prefix_caching=self.limits.enable_prefix_caching, batch_delay_us=round(self._config.batch_delay_ms * 1000),
            arrival_gap_us=ARRIVAL_GAP_US,
            max_plans_in_flight=self._config.max_plans_in_flight, max_steps_per_plan=self._config.max_steps_per_plan,
            table_checksums=self._config.check_invariants, step_sizes=reference.step_sizes if self._config.fill_steps else (),
        )  # fmt: skip
        if self._record is not None:
            self._record.control(now, "create", {"config": asdict(core_config), "epoch": self.epoch})
        self.core = Scheduler(core_config, epoch=self.epoch)

    def may_open(self, now: int) -> bool:
        """A complete group waits for its epoch and no brake is on."""
        return self.core is not None and not self._group.is_open and self._group.is_complete and now >= self._reopen_at

    def open(self, now: int) -> None:
        """Start the core's epoch on the complete group, with a warm-up request of our own. Raises Stop if the group does not fit."""
        assert self.core is not None and self.limits is not None
        offered, needed = self._group.min_blocks, self.limits.num_blocks
        if offered < needed:
            raise Stop(EXIT_RESTART, f"the new worker group has {offered} blocks, the engine was started with {needed}")
        if self._group.last_epoch >= self.epoch:
            raise Stop(EXIT_RESTART, f"a worker has seen epoch {self._group.last_epoch}, the engine is at {self.epoch}")
        self.note(now, "start_epoch", {})
        start = self.core.start_epoch()
        self.clock.reset(now)
        self.num_epochs += 1
        self.epoch, self.step, self.is_warm = start.epoch, 0, False
        self._last_progress = now
        self._log.info("epoch opened", epoch=self.epoch, num_blocks=start.num_blocks, max_model_len=start.max_model_len)
        self._submit_warm_up(now)
        lost = self._group.start(start, now)
        if lost is not None:
            self.lose(lost, now)

    def _submit_warm_up(self, now: int) -> None:
        """One greedy token of a one-token prompt: the whole path from queue to result, before anyone is told SERVING."""
        assert self.core is not None
        self._warm_up_key = INTERNAL_SLOT << KEY_BITS | self.num_epochs
        submit = Submit(
            key=self._warm_up_key, prompt=pack_u32([0]), sampling=SamplingParams(temperature=0.0), stop=StopRules(max_output_tokens=1),
            cache_namespace=bytes(32), priority=Priority.INTERACTIVE, bypass_prefix_cache=True,
        )  # fmt: skip
        if self._record is not None:
            self._record.arrival(now, submit)
        self.core.submit(submit, now)

    def take_own(self, batch: FrontendBatch) -> None:
        """What the engine's own requests got. Raises Stop if the model cannot compute even one token."""
        if any(f.reason == FinishReason.NUMERIC_FAULT for f in batch.finished):
            raise Stop(EXIT_FAILED, "the warm-up step produced NaN or infinity: the weights or the device are broken")

    def plan(self, now: int) -> None:
        """Plan and send as long as the core has something to do. Without workers only time goes on: limits fall due all the same."""
        if self.core is None:
            return
        if not self._group.is_open:
            self._expire(now)
            return
        for constraint in self.core.take_constraints():
            lost = self._group.send_constraint(constraint)
            if lost is not None:
                self.lose(lost, now)
                return
        while True:
            plan = self.core.plan_step(now)
            if self._record is not None:
                self._record.plan(now, plan)
            if plan is None:
                return
            self._audit()
            self.clock.sent(plan.step, self._size(plan), now)
            lost = self._group.send_plan(plan, now)
            if lost is not None:
                self.lose(lost, now)
                return

    def _expire(self, now: int) -> None:
        assert self.core is not None
        due = self.core.next_limit()
        if due is not None and due <= now:
            self.note(now, "expire", {})
            self.core.expire(now)

    def _size(self, plan: StepPlan) -> int:
        """About how many tokens the plan computes: its chunks, and as many decodes as the last result had."""
        return int(np.sum(view_u32(plan.chunk_lengths))) + self._num_decoding * plan.num_steps

    def apply(self, result: StepResult, now: int) -> None:
        """The next result of the epoch has come."""
        assert self.core is not None
        if self._record is not None:
            self._record.result(now, result)
        try:
            self.core.apply_result(result, now)
        except ResultError as error:
            self.lose(Lost(f"result of step {result.step} makes no sense: {error}", result.rank), now)
            return
        self._audit()
        self.clock.done(result.step, now)
        self.step = result.step
        self.device_us += result.device_us
        self._num_decoding = len(result.tokens) // 4
        self._last_progress = now
        self.is_warm = self.has_served = True

    def prepared(self, answer: ConstraintPrepared, now: int) -> None:
        """A rank has compiled a constraint, or cannot. The core hears of it when all have, or of the first that cannot."""
        assert self.core is not None
        if not self._preparing.answered(answer.digest, answer.rank, answer.fault, self._group.ranks):
            return
        self.note(now, "constraint_prepared", {"digest": answer.digest.hex(), "fault": answer.fault})
        self.core.constraint_prepared(answer.digest, answer.fault, now)
        self._audit()

    def lose(self, lost: Lost, now: int) -> None:
        """A rank is lost. Ends the epoch if one is open. Raises Stop when it happens too often."""
        was_open = self._group.is_open
        self._log.error("rank lost", rank=lost.rank, reason=lost.reason, epoch=self.epoch, step=self.step, epoch_open=was_open)
        if lost.kill:
            suspects = list(self._group.ranks) if was_open else [lost.rank]
            self._group.condemn(rank for rank in suspects if not (lost.is_replaced and rank == lost.rank))
        self._close(now, was_open, Loss.MEMORY if lost.is_memory else Loss.CRASH)
        if not was_open:
            return
        self._reopen_at = self._brake.failed(now)
        if self._brake.is_hopeless(now):
            raise Stop(EXIT_FAILED, f"worker groups keep failing, the last one because of rank {lost.rank}: {lost.reason}")

    def restart(self, now: int) -> int:
        """An operator wants new worker processes: ends those of the open group. Returns how many they are; 0 if no group is open."""
        if not self._group.is_open:
            return 0
        ranks = list(self._group.ranks)
        self._log.warning("workers are restarted on an operator's word", ranks=len(ranks), epoch=self.epoch, step=self.step)
        self._group.condemn(ranks)
        self._close(now, True, Loss.ORDERED)
        return len(ranks)

    def _close(self, now: int, was_open: bool, loss: Loss) -> None:
        """The group is gone. If its epoch was open, that ends and the core learns why."""
        self._group.close_epoch()
        self._preparing.clear()
        self._gathering_since = now
        if not was_open:
            return
        assert self.core is not None
        self._abort_warm_up(now)
        self.note(now, "fail_epoch", {"loss": int(loss)})
        self.core.fail_epoch(now, loss)
        self._audit()
        self.clock.reset(now)
        self.epoch += 1
        self.is_warm = False

    def _abort_warm_up(self, now: int) -> None:
        """A warm-up that was under way is no suspect in the search for a poisonous request."""
        assert self.core is not None
        self.note(now, "abort", {"key": self._warm_up_key, "reason": int(FinishReason.CANCELLED)})
        self.core.abort(self._warm_up_key, now)

    def watch(self, now: int) -> None:
        """Once in a while: hung ranks, silent ranks, ranks that never came. Raises Stop naming the missing."""
        lost = self._group.check(now)
        deadline = self.clock.deadline()
        if lost is None and self._group.is_open and deadline is not None and now > deadline:
            lost = Lost(f"step {self.clock.next_step} is overdue", 0)
        if lost is not None:
            self.lose(lost, now)
        if not self._group.is_complete:
            missing = self._group.missing(self._gathering_since, now)
            if missing is not None:
                raise Stop(EXIT_FAILED, missing)

    def is_stalled(self, now: int) -> bool:
        """Work waits and nothing has moved for half of what a step is granted."""
        if self.core is None or not self._group.is_open:
            return False
        if self.clock.num_in_flight:
            return self.clock.is_stalled(now)
        if self.core.stats().num_waiting == 0:
            self._last_progress = now
        return now - self._last_progress > int(self._config.step_deadline_s * SECOND) // 2

    def is_braking(self, now: int) -> bool:
        """Worker groups fail so often that new requests are better sent elsewhere."""
        return not self._group.is_open and self._brake.is_braking(now)

    def forgive(self, pause: int) -> None:
        """The scheduler itself was stopped for so long (microseconds)."""
        self.clock.forgive(pause)
        self._group.forgive(pause)
        self._last_progress += pause
        self._gathering_since += pause

    def note(self, now: int, name: str, args: dict[str, Any]) -> None:
        """Writes down that the core is about to be changed in this way."""
        if self._record is not None:
            self._record.control(now, name, args)

    def _audit(self) -> None:
        if self._config.check_invariants and self.core is not None:
            invariants.check(self.core)


def effective_limits(config: EngineConfig, offered_blocks: int, model_len: int) -> EngineLimits:
    """The limits that this configuration, model and pool allow together. Raises Stop if the pool cannot hold two tokens.

    offered_blocks: least over the ranks, null block included. model_len: tokens that the model can attend to.
    """
    num_blocks = min(offered_blocks, config.num_blocks or offered_blocks)
    pool_tokens = (num_blocks - 1) * config.block_size
    max_model_len = min(config.max_model_len or model_len, model_len, pool_tokens)
    if max_model_len < 2:
        raise Stop(EXIT_FAILED, f"a pool of {num_blocks} blocks is too small to serve anything")
    return EngineLimits(
        block_size=config.block_size, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens, enable_prefix_caching=config.enable_prefix_caching,
        retention_ms=round(config.resume_retention_s * 1000), front_end_grace_ms=round(config.resume_grace_s * 1000),
    )  # fmt: skip
