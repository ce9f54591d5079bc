"""The clients and front ends: they ask, cancel, pause, stop and vanish as the scenario says, and bring requests back after a restart.

Everything they tell the scheduler goes through `Port`, which also writes it into a recording if there is one.
"""

from random import Random

from sim.auditor import PlanAudit, check_lift
from sim.oracle import Violation
from sim.scenario import STEP_US, RequestPlan
from sim.streams import Open, Streams

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.engine.recorder import Recorder
from pagecast_wire.intake import Abort, Accepted, Pause, Rejected, RejectReason, StopAt, Submit
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import FinishReason


class Port:
    """The scheduler core as the engine calls it: every input is recorded, in order, before it is passed on."""

    def __init__(self, config: SchedulerConfig, recorder: Recorder | None) -> None:
        self._config, self._recorder = config, recorder
        self.create(1, 0)

    def create(self, epoch: int, now: int) -> None:
        if self._recorder is not None:
            fields = {name: getattr(self._config, name) for name in self._config.__dataclass_fields__}
            self._recorder.control(now, "create", {"config": fields, "epoch": epoch})
        self.core = Scheduler(self._config, epoch=epoch)

    def submit(self, submit: Submit, now: int) -> Accepted | Rejected:
        self._arrival(submit, now)
        return self.core.submit(submit, now)

    def abort(self, key: int, now: int) -> None:
        self._arrival(Abort((key,)), now)
        self.core.abort(key, now)

    def stop_at(self, key: int, sequence: int, keep: int, now: int) -> None:
        self._arrival(StopAt(key, sequence, keep), now)
        self.core.stop_at(key, sequence, keep, now)

    def pause(self, key: int, paused: bool, now: int) -> None:
        self._arrival(Pause(key, paused), now)
        self.core.pause(key, paused, now)

    def drop_frontend(self, slot: int, now: int) -> None:
        self._control("drop_frontend", now, slot=slot)
        self.core.drop_frontend(slot, now)

    def constraint_prepared(self, digest: bytes, fault: int, now: int) -> None:
        if self._recorder is not None:
            self._recorder.control(now, "constraint_prepared", {"digest": digest.hex(), "fault": fault})
        self.core.constraint_prepared(digest, fault, now)

    def start_epoch(self, now: int) -> StartEpoch:
        start = self.core.start_epoch()
        self._control("start_epoch", now, epoch=start.epoch)
        return start

    def fail_epoch(self, now: int) -> None:
        self._control("fail_epoch", now)
        self.core.fail_epoch(now)

    def plan_step(self, now: int) -> StepPlan | None:
        plan = self.core.plan_step(now)
        if self._recorder is not None:
            self._recorder.plan(now, plan)
        return plan

    def apply_result(self, result: StepResult, now: int) -> None:
        if self._recorder is not None:
            self._recorder.result(now, result)
        self.core.apply_result(result, now)

    def _arrival(self, message: Submit | Abort | StopAt | Pause, now: int) -> None:
        if self._recorder is not None:
            self._recorder.arrival(now, message)

    def _control(self, name: str, now: int, **args: int) -> None:
        if self._recorder is not None:
            self._recorder.control(now, name, args)


class Clients:
    """All clients of one run. Methods are called at a virtual time `now`; what they plan for later they return."""

    def __init__(self, port: Port, streams: Streams, audit: PlanAudit, config: SchedulerConfig, random: Random) -> None:
        self._port, self._streams, self._audit, self._config, self._random = port, streams, audit, config, random
        self.gone_slots: set[int] = set()

    def find_open(self, key: int) -> Open | None:
        return self._streams.open.get(key)

    def arrive(self, plan: RequestPlan, now: int) -> bool:
        """Submit; True if accepted."""
        if plan.slot in self.gone_slots:
            return False
        active = self._audit.active_tenants(self._port.core)
        answer = self._port.submit(plan.submit(), now)
        if isinstance(answer, Rejected):
            self._check_refusal(plan, answer)
            return False
        check_lift(self._port.core, plan.tenant, active)
        self._audit.check_queue_bound(self._port.core)
        self._streams.accept(plan, now)
        return True

    def _check_refusal(self, plan: RequestPlan, answer: Rejected) -> None:
        config, total, state = self._config, len(plan.prompt) + plan.max_output_tokens, self._port.core.state
        full = state.num_queued_requests >= config.max_queued_requests
        full = full or state.num_queued_tokens + len(plan.prompt) > config.max_queued_tokens
        truths = {
            RejectReason.OVERLOADED: full,
            RejectReason.PROMPT_TOO_LONG: len(plan.prompt) > config.max_model_len - 1,
            RejectReason.TOO_MANY_TOKENS: total > min(config.max_model_len, config.pool_tokens),
            RejectReason.INVALID: plan.num_sequences > config.max_num_seqs,
            RejectReason.DEADLINE_UNREACHABLE: plan.deadline_ms >= 0,
            RejectReason.QUEUE_TIME_EXCEEDED: plan.max_queue_ms >= 0,
        }
        if answer.key != plan.key or not truths.get(answer.reason, False):
            raise Violation(f"request {plan.key:#x} refused with {answer.reason.name} ({answer.field}), which is not true")

    def react(self, request: Open, now: int) -> int | None:
        """Stop texts, and a cancel that depends on what was received: returns how many microseconds later it is sent."""
        plan = request.plan
        if plan.stop_at is not None:
            sequence, keep = plan.stop_at
            output = request.outputs[sequence]
            if output.stop_keep < 0 and output.reason is None and len(output.tokens) >= max(keep, 1):
                output.stop_keep = keep
                self._port.stop_at(plan.key, sequence, keep, now)
        if plan.cancel_after_tokens >= 0 and not request.cancelled and len(request.outputs[0].tokens) >= plan.cancel_after_tokens:
            request.cancelled = True
            return self._random.randrange(2 * STEP_US)
        return None

    def cancel(self, key: int, now: int) -> None:
        request = self.find_open(key)
        if request is not None:
            request.cancelled = True
            self._port.abort(key, now)
            self._audit.cancelled_at[key] = self._audit.step

    def pause(self, key: int, paused: bool, now: int) -> None:
        if self.find_open(key) is not None:
            (self._audit.paused.add if paused else self._audit.paused.discard)(key)
            self._port.pause(key, paused, now)

    def vanish(self, slot: int, now: int) -> None:
        """A front end is gone, and with it whatever its clients wanted."""
        self.gone_slots.add(slot)
        for key, request in self._streams.requests.items():
            if request.plan.slot == slot:
                self._streams.end_locally(request, FinishReason.CANCELLED)
                self._audit.cancelled_at.setdefault(key, self._audit.step)
        self._port.drop_frontend(slot, now)

    def bring_back(self, request: Open, now: int) -> None:
        """After a scheduler was lost: submit again with the history, unless the client wants no more of it."""
        plan = request.plan
        if request.cancelled:
            self._streams.end_locally(request, FinishReason.CANCELLED)
            return
        for output in request.outputs:
            if output.stop_keep >= 0 and output.reason is None:
                output.reason = FinishReason.STOP
        if request.ended:
            self._streams.end_locally(request, FinishReason.STOP)
            return
        request.brought_back = True
        request.num_recoveries = 0
        elapsed_ms = (now - request.arrival) // 1000
        answer = self._port.submit(plan.submit(self._streams.history(request), elapsed_ms), now)
        if isinstance(answer, Rejected):
            if answer.reason not in (RejectReason.DEADLINE_UNREACHABLE, RejectReason.QUEUE_TIME_EXCEEDED):
                raise Violation(f"request {plan.key:#x} cannot come back: {answer.reason.name}")
            self._streams.end_locally(request, FinishReason.DEADLINE_EXCEEDED)
        elif plan.key in self._audit.paused:
            self._port.pause(plan.key, True, now)
