"""The whole system in one thread under a virtual clock: clients, scheduler core, plan link and an oracle worker, from one seed.

`simulate(seed)` returns what happened, or raises SimulationFailed with a one-line command that replays it.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sim.auditor import PlanAudit, check_bounds, check_core, check_idle, check_limits, check_recomputed, watching_victims
from sim.clients import Clients, Port
from sim.oracle import Identity, OracleWorker, Violation, WorkerDied
from sim.paces import Paces, small_paces
from sim.plan_link import PlanReceiver, PlanSender, Weather
from sim.scenario import STEP_US, RequestPlan, Scenario, draw
from sim.streams import Streams
from sim.trace import line

from pagecast_scheduler.engine.recorder import Recorder
from pagecast_wire.codec import decode, encode
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import FLAG_BAD, PlanGap, StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault

HEARTBEAT_US = 10 * STEP_US
MAX_EVENTS = 30_000
MAX_TIME_US = 3_000 * STEP_US
MAX_PLANS = 4_000
"""Liveness: a run that is not over by then never will be; runs take a tenth of it."""


class SimulationFailed(AssertionError):
    """A seed broke a law. The text ends with the command that replays it."""

    def __init__(self, seed: int, cause: BaseException, trace: list[str]) -> None:
        self.seed, self.cause = seed, cause
        lines = "\n".join(trace)
        super().__init__(f"{lines}\n{type(cause).__name__}: {cause}\nreplay: .venv/bin/python tests/sim/run.py --seed {seed}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Numbers of one run that passed."""

    seed: int
    num_plans: int
    num_preemptions: int
    num_epochs: int
    virtual_us: int
    reasons: dict[str, int]
    prefix_tokens_hit: int
    num_spread: int
    num_put_off: int
    num_held: int


class World:
    """One run. Every handler ends in `_turn`, which is what the engine's loop does after each event."""

    def __init__(self, scenario: Scenario, recorder: Recorder | None = None) -> None:
        self.scenario, self.config = scenario, scenario.config
        self.random = Random(scenario.seed ^ 0x5EED)
        self.now = 0
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=40)
        self.streams = Streams(self.config.max_model_len, self.config.max_recoveries)
        self.identities = {plan.seed: self._identity(plan) for plan in scenario.requests}
        self.audit = PlanAudit(self.config, {plan.seed: plan.key for plan in scenario.requests})
        self.paces = Paces()
        with small_paces():
            self.port = Port(self.config, recorder)
        self.clients = Clients(self.port, self.streams, self.audit, self.config, self.random)
        self.sender, self.receiver = PlanSender(), PlanReceiver()
        self.weather = Weather(self.random, scenario.latency_us, scenario.jitter_us, scenario.loss, scenario.duplication)
        self.worker = OracleWorker(self.identities.__getitem__)
        self.worker_alive, self.worker_life, self.group_up, self.busy_until = True, 0, False, 0
        self.num_arrived = self.num_events = self.num_epochs = self.num_preemptions = self.prefix_tokens_hit = 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ticks = 0
        self._wake_at = -1

    def _identity(self, plan: RequestPlan) -> Identity:
        at = lambda output: len(plan.prompt) + output - 1 if output >= 0 else -1
        may_hit = self.config.enable_prefix_caching and not plan.bypass_prefix_cache and plan.num_prompt_logprobs < 0
        return Identity(plan.key, plan.namespace, may_hit, at(plan.broken_output), at(plan.poison_output), at(plan.dead_output) + 1)

    # The loop ----------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every stream has ended and everything sent has come back."""
        scenario = self.scenario
        self._open_epoch()
        for plan in scenario.requests:
            self.at(plan.arrival_us, self._arrive, plan)
        for time in scenario.kills_us:
            self.at(time, self._kill)
        for time in scenario.restarts_us:
            self.at(time, self._restart_scheduler)
        for time in scenario.transfers_us:
            self.at(time, self._transfer)
        for slot, time in scenario.lost_slot_us:
            self.at(time, self._ask, "vanish", slot)
        self.at(HEARTBEAT_US, self._heartbeat)
        with watching_victims(), small_paces(self.paces):
            while not self._done():
                self.num_events += 1
                if not self._events or self.num_events > MAX_EVENTS or self.now > MAX_TIME_US or self.audit.num_plans > MAX_PLANS:
                    raise Violation(f"no end in sight after {self.num_events} events, {self.now} us, {self.audit.num_plans} plans")
                self.now, _, handler, arguments = heapq.heappop(self._events)
                handler(*arguments)
        check_idle(self.port.core, self.streams)
        return self._outcome()

    def at(self, time: int, handler: Callable[..., None], *arguments: Any) -> None:
        self._ticks += 1
        heapq.heappush(self._events, (time, self._ticks, handler, arguments))

    def after(self, delay: int, handler: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, handler, *arguments)

    def _done(self) -> bool:
        arrived = self.num_arrived == len(self.scenario.requests)
        return arrived and not self.streams.open and not self.sender.unanswered and self.group_up and not self.audit.held

    def _turn(self) -> None:
        """Plan as far as possible, hand out what was learnt, check every law, set the alarm."""
        core = self.port.core
        self._take_batches()
        for constraint in core.take_constraints() if self.group_up else ():
            self.after(self.scenario.latency_us + self.random.randrange(6 * STEP_US), self._compiled, self.worker_life, constraint)
        while self.group_up:
            plan = self.port.plan_step(self.now)
            if plan is not None:
                self.trace.append(("plan", self.now, plan))
            self._take_batches()
            if plan is None:
                check_limits(self.streams, self.now)
                break
            self.audit.on_plan(plan, len(self.sender.unanswered), core.state.applied_step, core.state.kv.pool.num_free)
            self.audit.count_computed(plan, core)
            self.sender.sent(plan)
            self._send_plan(plan)
        check_core(core)
        check_bounds(core, self.config)
        self.audit.end_holds(core.state.applied_step)
        wake = core.next_wakeup() if self.group_up else None
        if wake is not None and (self._wake_at <= self.now or wake < self._wake_at):
            self._wake_at = max(wake, self.now + 1)
            self.at(self._wake_at, self._turn)

    def _take_batches(self) -> None:
        batches = self.port.core.take_batches()
        if not batches:
            return
        seen: set[int] = set()
        for slot, batch in batches:
            if slot in seen:
                raise Violation(f"front end {slot} got two batches at once")
            seen.add(slot)
            if slot not in self.clients.gone_slots:
                self.trace.append(("batch", self.now, batch))
                self.streams.on_batch(slot, batch, self.now)
                check_recomputed(self.audit, self.streams, batch)
        for request in list(self.streams.open.values()):
            delay = self.clients.react(request, self.now)
            if delay is not None:
                self.after(delay, self._ask, "cancel", request.plan.key)

    # Clients -----------------------------------------------------------------------------------------------------------

    def _arrive(self, plan: RequestPlan) -> None:
        self.num_arrived += 1
        self.trace.append(("submit", self.now, plan))
        if self.clients.arrive(plan, self.now):
            for start, end in plan.pauses:
                self.after(start, self._ask, "pause", plan.key, True)
                self.after(end, self._ask, "pause", plan.key, False)
            if plan.cancel_us >= 0:
                self.after(plan.cancel_us, self._ask, "cancel", plan.key)
        self._turn()

    def _ask(self, what: str, *arguments: Any) -> None:
        """cancel, pause or vanish."""
        self.trace.append((what, self.now, *arguments))
        getattr(self.clients, what)(*arguments, self.now)
        self._turn()

    # The worker group --------------------------------------------------------------------------------------------------

    def _open_epoch(self) -> None:
        start = self.port.start_epoch(self.now)
        self.trace.append(("epoch", self.now, start))
        self.num_epochs += 1
        self.audit.open(start)
        self.sender.open(start)
        self.after(self.scenario.latency_us, self._worker_starts, self.worker_life, start)
        self.group_up = True

    def _worker_starts(self, life: int, start: StartEpoch) -> None:
        if life == self.worker_life and self.receiver.open(start):
            self.worker.start_epoch(start)

    def _send_plan(self, plan: StepPlan) -> None:
        frame = encode(plan)
        for delay in self.weather.arrivals():
            self.after(delay, self._worker_receives, self.worker_life, frame)

    def _worker_receives(self, life: int, frame: bytes) -> None:
        if life != self.worker_life or not self.worker_alive:
            return
        received = self.receiver.receive(decode(frame, "to_worker"))
        if isinstance(received, PlanGap):
            self.after(self.scenario.latency_us, self._gap, received)
        elif received is not None:
            self._execute(received)

    def _execute(self, plan: StepPlan) -> None:
        try:
            executed = self.worker.execute(plan)
        except WorkerDied:
            self.trace.append(("poison", self.now, plan.step))
            self._kill()
            return
        if self.receiver.epoch == self.audit.epoch:
            self.audit.on_executed(plan.step, executed.sampled)
        for (seed, sequence), flag in zip(executed.sampled * plan.num_steps, executed.result.flags):
            identity = self.identities[seed]
            if flag & FLAG_BAD and identity.broken_at >= 0 and sequence == 0 and identity.key in self.streams.requests:
                self.streams.requests[identity.key].broken.add(sequence)
        cost = STEP_US * plan.num_steps
        if self.random.random() < self.scenario.slow_steps:
            cost *= self.random.randint(2, 12)
        self.busy_until = max(self.busy_until, self.now) + cost
        arrives = self.busy_until + self.scenario.latency_us
        self.at(arrives, self._result, encode(executed.result))
        if self.random.random() < self.scenario.late_results:
            self.at(arrives + self.random.randrange(8 * STEP_US), self._result, encode(executed.result))

    def _result(self, frame: bytes) -> None:
        result: StepResult = decode(frame, "from_worker")
        self.trace.append(("result", self.now, result))
        self.sender.answered(result.epoch, result.step)
        self.port.apply_result(result, self.now)
        self._turn()

    def _compiled(self, life: int, constraint: Constraint) -> None:
        """The worker has compiled a constraint, unless it died over it."""
        if life != self.worker_life or not self.worker_alive or not self.group_up:
            return
        digest, fault = constraint_digest(constraint), ConstraintFault.NONE
        if constraint.text.startswith("bad"):
            fault = ConstraintFault.TOO_LARGE
        else:
            self.worker.compiled.add(digest)
        self.trace.append(("compiled", self.now, constraint.text))
        self.port.constraint_prepared(digest, fault, self.now)
        self._turn()

    def _gap(self, gap: PlanGap) -> None:
        for plan in self.sender.on_gap(gap):
            self._send_plan(plan)

    def _heartbeat(self) -> None:
        if self.worker_alive:
            for plan in self.sender.on_heartbeat(self.receiver.epoch, self.receiver.last_step):
                self._send_plan(plan)
        self.after(HEARTBEAT_US, self._heartbeat)

    def _transfer(self) -> None:
        """Another stream begins to read the blocks of a running row: they are held until the last planned step is applied."""
        state = self.port.core.state
        running = state.rows.running()
        if running and self.group_up:
            blocks = state.kv.table.row(self.random.choice(running).row)
            until = state.step
            if until > state.applied_step and len(blocks):
                self.trace.append(("transfer", self.now, blocks.tolist(), until))
                state.kv.pool.hold(blocks, until)
                self.audit.held.append((until, frozenset(blocks.tolist())))

    def _kill(self) -> None:
        """The group dies; its death is noticed a little later, and a new group dials in later still."""
        if not self.worker_alive:
            return
        self.trace.append(("kill", self.now))
        self.worker_alive = False
        self.after(self.random.randrange(STEP_US), self._group_lost)

    def _group_lost(self) -> None:
        self.trace.append(("group lost", self.now))
        self.group_up = False
        self._note_crash()
        self.port.fail_epoch(self.now)
        self.sender.unanswered.clear()
        self.audit.held.clear()
        self.after(self.random.randrange(4 * STEP_US), self._group_returns)
        self._turn()

    def _note_crash(self) -> None:
        """Who may blame the crash for their end: everyone for WORKER_LOST, only who was there alone for POISON_REQUEST."""
        keys = {key for key, _ in self.audit.rows.values()}.union(*(self.audit.facts[step].present for step in self.sender.unanswered))
        present = [request for key in sorted(keys) if (request := self.clients.find_open(key)) is not None]
        for request in present:
            request.num_recoveries += 1
            request.may_be_poison = request.may_be_poison or len(present) == 1

    def _group_returns(self) -> None:
        self.worker_alive, self.busy_until = True, self.now
        self.worker_life += 1
        self.worker.compiled.clear()
        self.receiver = PlanReceiver()
        self._open_epoch()
        self._turn()

    def _restart_scheduler(self) -> None:
        """A new scheduler process adopts the worker and gets every open request back with its history, in any order."""
        if not self.group_up:
            return
        self._count()
        self.trace.append(("scheduler restart", self.now))
        self.port.create(self.audit.epoch + 1, self.now)
        self._wake_at = -1
        self._open_epoch()
        again = list(self.streams.open.values())
        self.random.shuffle(again)
        for request in again:
            self.clients.bring_back(request, self.now)
        self._turn()

    # The end -----------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        stats = self.port.core.stats()
        self.num_preemptions += stats.num_preemptions
        self.prefix_tokens_hit += stats.prefix_tokens_hit

    def _outcome(self) -> Outcome:
        self._count()
        reasons: dict[str, int] = {}
        for request in self.streams.requests.values():
            for output in request.outputs:
                name = output.reason.name if output.reason else "OPEN"
                reasons[name] = reasons.get(name, 0) + 1
        return Outcome(
            self.scenario.seed, self.audit.num_plans, self.num_preemptions, self.num_epochs, self.now, reasons, self.prefix_tokens_hit,
            self.paces.num_spread, self.paces.num_put_off, self.paces.num_held,
        )  # fmt: skip


def simulate(seed: int) -> Outcome:
    """Run one seed. Raises SimulationFailed, whatever went wrong in it."""
    world = World(draw(seed))
    try:
        return world.run()
    except Exception as error:
        raise SimulationFailed(seed, error, [line(entry) for entry in world.trace]) from error
