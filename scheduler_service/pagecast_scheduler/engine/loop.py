"""The scheduler process: one thread, one loop around the pure core.

Each turn waits for a message, a death or a time, then: results and worker news in, requests in, plans out, token batches out.
Plans leave before batches, so that the workers never wait for the front ends.
"""

import gc
import os
import time
from collections.abc import Callable
from uuid import uuid4

import zmq

from pagecast_scheduler.engine import run_state
from pagecast_scheduler.engine.cache_feed import CacheFeed
from pagecast_scheduler.engine.config import ConfigError, EngineConfig
from pagecast_scheduler.engine.directory import Directory
from pagecast_scheduler.engine.epochs import INTERNAL_SLOT, Epochs, Record, Stop
from pagecast_scheduler.engine.frontends import Frontends
from pagecast_scheduler.engine.intake import Intake
from pagecast_scheduler.engine.link import Router
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.metrics import Metrics
from pagecast_scheduler.engine.questions import QUESTIONS, Questions
from pagecast_scheduler.engine.recovery import SECOND
from pagecast_scheduler.engine.workers import Lost, WorkerGroup
from pagecast_wire.control import UnwatchCache, WatchCache
from pagecast_wire.intake import EngineStatus, ServingState
from pagecast_wire.keys import read_scheduler_keys
from pagecast_wire.pulse import Pulse
from pagecast_wire.result import ConstraintPrepared, StepResult

TICK = SECOND // 5
"""Between two looks at everything that is not urgent (microseconds)."""

HOLD = 3 * SECOND
"""How long, at most, a restarted scheduler waits for the requests of the front ends it should find."""

DRAIN = 8 * SECOND
"""How long requests may go on after the process was asked to stop; then front ends take them to the next scheduler."""

LAST_LOOKS, LAST_LOOK_MS = 5, 10
"""How often, and for how long each time, to look for what a worker sent before it ended."""

TAKEN_AT_ONCE = 32
"""Structs of front ends that are taken before workers and the next plan have a turn: to take a request costs some 50 us, and of a list that
is arriving the first ones are computed while the rest comes in."""

SETTLED_AT_ONCE = 8
"""Ended sequences whose blocks are filed between two looks at the sockets, while nothing comes in."""

COLLECT_AFTER = 30 * SECOND
"""Idle time after which the garbage collector, otherwise off, is run once."""


def monotonic_us() -> int:
    """Microseconds of the monotonic clock."""
    return time.monotonic_ns() // 1000


class Engine:
    """Owns the sockets and the order of things within a turn. `run` returns when stopped; `stop` may be called from anywhere."""

    def __init__(self, config: EngineConfig, record: Record | None = None, clock: Callable[[], int] = monotonic_us) -> None:
        """Binds both sockets. Raises zmq.ZMQError, OSError, KeysError."""
        self._log = logger("engine")
        self._config = config
        self._clock = clock
        self._record = record
        self._incarnation = uuid4().hex
        self.reason = ""  # why `run` returned, one line
        keys = read_scheduler_keys(config.wire_keys) if config.wire_keys is not None else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frontend_router = Router(self._context, config.frontends_path, "from_frontend")
        self._worker_router = Router(self._context, config.workers_path, "from_worker", config.head, keys)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # never closed: a late signal may still write to it
        state = run_state.load(config.run_dir)
        now = clock()
        self._group = WorkerGroup(config, self._worker_router, self._incarnation)
        self._epochs = Epochs(config, self._group, state.epoch, record, now)
        self._frontends = Frontends(self._frontend_router, self._incarnation, state.next_slot, state.frontends)
        self._directory = Directory(round(config.resume_grace_s * SECOND), round(config.resume_retention_s * SECOND))
        self._intake = Intake(self._frontends, self._epochs, self._directory, record)
        self._cache_feed = CacheFeed(self._frontends, self._incarnation)
        self._questions = Questions(self._epochs, self._group, self._intake, self._directory)
        self._metrics = _metrics(config.metrics_port)
        self._pulse = Pulse(f"{config.run_dir}/scheduler.pulse")
        self._poller = zmq.Poller()
        self._watched: set[int] = set()
        self._saved_epoch = state.epoch
        self._hold_until: int | None = None
        self._drain_until: int | None = None
        self._num_stops = 0
        self._next_tick = now
        self._next_status = now
        self._last_news: tuple[ServingState | None, str] = (None, "")
        self._last_load: object = None
        self._idle_since: int | None = now
        for source in (self._frontend_router.socket, self._worker_router.socket, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def stop(self) -> None:
        """Drain and return; called a second time, return at once. Safe in a signal handler and from another thread."""
        self._num_stops += 1
        os.eventfd_write(self._wake, 1)

    def run(self) -> int:
        """Serve until stopped. Returns the exit code of the process."""
        self._log.info("scheduler started", pid=os.getpid(), incarnation=self._incarnation, ranks=self._config.tensor_parallel_size)
        gc.collect()
        gc.freeze()
        gc.disable()
        before = self._clock()
        try:
            while True:
                timeout = self._timeout_ms(before)
                events = self._poller.poll(timeout)
                now = self._clock()
                self._forgive(now - before - timeout * 1000)
                before = now
                self._turn(events, now)
        except Stop as stop:
            self.reason = str(stop)
            self._log.info("scheduler ends", code=stop.code, reason=self.reason)
            return stop.code
        finally:
            gc.enable()
            gc.unfreeze()
            self.close()

    def close(self) -> None:
        """Close what was opened."""
        self._pulse.end()
        self._frontend_router.close()
        self._worker_router.close()
        self._context.term()
        if self._record is not None:
            self._record.close()
        if self._metrics is not None:
            self._metrics.close()

    def _timeout_ms(self, now: int) -> int:
        """Until the next thing that happens by itself. Whatever arrives ends the wait at once."""
        if self._epochs.core is not None and not self._epochs.core.is_settled:
            return 0
        until = self._next_tick
        if self._epochs.core is not None and not self._intake.is_holding:
            core = self._epochs.core
            wakeup = core.next_wakeup() if self._group.is_open else core.next_limit()
            if wakeup is not None:
                until = min(until, max(wakeup, now + 1))
        return max(0, -(-(until - now) // 1000))

    def _forgive(self, overshoot: int) -> None:
        """Woken far too late: this process was stopped, or the machine was; nobody else was silent."""
        if overshoot > SECOND:
            self._log.warning("the scheduler was stopped", pause_us=overshoot)
            self._epochs.forgive(overshoot)
            self._frontends.forgive(overshoot)

    def _turn(self, events: list[tuple[object, int]], now: int) -> None:
        ready = {source for source, _ in events}
        if self._wake in ready:
            os.eventfd_read(self._wake)
            self._begin_drain(now)
        if self._worker_router.socket in ready:
            self._receive_workers(now)
        if self._frontend_router.socket in ready:
            self._receive_frontends(now)
        self._receive_deaths(ready, now)
        self._advance_epoch(now)
        if not self._intake.is_holding:
            self._epochs.plan(now)
        self._flush(now)
        if not events and self._epochs.core is not None:
            self._epochs.core.settle(SETTLED_AT_ONCE)
        if now >= self._next_tick:
            self._tick(now)
        self._send_status(now)
        self._watch_processes()
        if self._epochs.epoch != self._saved_epoch or self._frontends.changed:
            self._save_state()
        if self._drain_until is not None and (now >= self._drain_until or self._is_idle()):
            raise Stop(0, "stopped")

    def _receive_workers(self, now: int) -> None:
        for identity, message in self._worker_router.receive():
            news = self._group.receive(identity, message, now)
            if isinstance(news, StepResult):
                self._epochs.apply(news, now)
            elif isinstance(news, ConstraintPrepared):
                self._epochs.prepared(news, now)
            elif isinstance(news, Lost):
                self._epochs.lose(news, now)

    def _receive_frontends(self, now: int) -> None:
        for identity, message in self._frontend_router.receive(TAKEN_AT_ONCE):
            sender = self._frontends.receive(identity, message, now)
            if sender is None:
                continue
            if isinstance(message, WatchCache | UnwatchCache):
                self._cache_feed.take(sender.slot, message, self._epochs.core)
            elif isinstance(message, QUESTIONS):
                self._frontends.send(sender.slot, self._questions.answer(message, now))
            else:
                self._intake.take(sender, message, now)

    def _receive_deaths(self, ready: set[object], now: int) -> None:
        for fd in self._watched & ready:
            if fd in self._group.pidfds:
                self._hear_out(now)
            lost = self._group.exited(fd)
            if lost is not None:
                self._epochs.lose(lost, now)
            else:
                self._frontends.exited(fd, now)

    def _hear_out(self, now: int) -> None:
        """A worker has ended, and may have said why: its last words are on their way from one thread to the other."""
        for _ in range(LAST_LOOKS):
            if self._worker_router.socket.poll(LAST_LOOK_MS):
                self._receive_workers(now)

    def _advance_epoch(self, now: int) -> None:
        """Make the core when the first group is complete, end the hold when it is time, open an epoch when one may open."""
        if self._epochs.core is None and self._group.is_complete:
            self._epochs.create_core(now)
            reference, limits = self._group.reference, self._epochs.limits
            assert reference is not None and limits is not None
            self._intake.is_holding = self._frontends.awaits_requests()
            self._hold_until = now + HOLD
            self._frontends.set_welcome(reference.model, limits, now)
        if self._intake.is_holding and self._hold_until is not None and (now >= self._hold_until or not self._frontends.awaits_requests()):
            self._frontends.stop_waiting()
            self._intake.release(now)
        if self._epochs.may_open(now) and not self._intake.is_holding:
            self._epochs.open(now)

    def _flush(self, now: int) -> None:
        for slot, batch in self._intake.take_batches(now):
            if slot == INTERNAL_SLOT:
                self._epochs.take_own(batch)
                continue
            self._frontends.send(slot, batch)
            if self._metrics is not None:
                self._metrics.observe(batch)

        if self._epochs.core is not None:
            self._cache_feed.flush(self._epochs.core)

    def _tick(self, now: int) -> None:
        """Everything that may wait a fifth of a second."""
        self._next_tick = now + TICK
        self._pulse.beat()
        self._epochs.watch(now)
        for slot in self._frontends.take_vanished(now):
            self._intake.drop(slot, now)
            self._cache_feed.drop(slot)
        self._intake.expire(now)
        self._flush(now)  # whoever uses the id of a request that ended just now must find it free
        self._collect_garbage(now)
        if self._metrics is not None:
            self._metrics.recording(self._record is not None and bool(self._record.error))
            self._metrics.update(self._status(now), self._group, self._frontends, self._epochs.limits, self._num_dropped())

    def _num_dropped(self) -> int:
        return self._frontend_router.num_dropped + self._worker_router.num_dropped + self._intake.num_malformed

    def _save_state(self) -> None:
        self._saved_epoch = self._epochs.epoch
        state = run_state.RunState(self._epochs.epoch, self._frontends.next_slot, self._frontends.known())
        try:
            run_state.save(self._config.run_dir, state)
        except OSError as error:
            self._log.warning("scheduler state not written", errno=error.errno)

    def _is_idle(self) -> bool:
        if self._epochs.core is None:
            return True
        stats = self._epochs.core.stats()
        return stats.num_running == 0 and stats.num_waiting == 0 and self._epochs.clock.num_in_flight == 0

    def _collect_garbage(self, now: int) -> None:
        """The collector is off while serving (a pause in a step is a pause for everyone); cycles are swept in quiet times."""
        if not self._is_idle():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > COLLECT_AFTER:
            gc.collect()
            self._idle_since = now

    def _begin_drain(self, now: int) -> None:
        if self._num_stops > 1:
            raise Stop(0, "stopped at once")
        self._intake.is_draining = True
        self._drain_until = now + DRAIN
        self._next_tick = now

    def _state(self, now: int) -> ServingState:
        if self._intake.is_draining or self._intake.refuse_from is not None:
            return ServingState.DRAINING
        if not (self._group.is_open and self._epochs.is_warm):
            return ServingState.RECOVERING if self._epochs.has_served else ServingState.STARTING
        return ServingState.STALLED if self._epochs.is_stalled(now) else ServingState.SERVING

    def _status(self, now: int) -> EngineStatus:
        load = tuple(progress for _, progress in sorted(self._group.load.items()))
        if self._epochs.core is None:
            return EngineStatus(self._state(now), self._epochs.epoch, 0, load=load, log_level=self._group.log_level)
        stats = self._epochs.core.stats()
        return EngineStatus(
            state=self._state(now), epoch=self._epochs.epoch, step=self._epochs.step,
            num_running=stats.num_running, num_waiting=stats.num_waiting, num_blocks=stats.num_blocks,
            num_blocks_referenced=stats.num_blocks_referenced, num_blocks_cached=stats.num_blocks_cached,
            prefix_tokens_asked=stats.prefix_tokens_asked, prefix_tokens_hit=stats.prefix_tokens_hit,
            num_preemptions=stats.num_preemptions, num_recoveries=stats.num_recoveries,
            output_tokens=stats.output_tokens, prompt_tokens=stats.prompt_tokens, forced_tokens=stats.forced_tokens,
            device_us=self._epochs.device_us, load=load,
            log_level=self._group.log_level,
        )  # fmt: skip

    def _send_status(self, now: int) -> None:
        """To every front end when the state or the log level changes, within a tick when loading gets on, and each second."""
        state = self._state(now)
        load = dict(self._group.load) if not self._group.is_open else None
        news = (state, self._group.log_level)
        due = news != self._last_news or now >= self._next_status or (load != self._last_load and self._next_tick == now + TICK)
        if not due:
            return
        if state != self._last_news[0]:
            self._log.info("state", state=state.name, epoch=self._epochs.epoch)
        self._last_news, self._last_load, self._next_status = news, load, now + SECOND
        self._frontends.broadcast(self._status(now))

    def _watch_processes(self) -> None:
        """Keep the poller's set of pidfds equal to the processes that are connected."""
        wanted = {*self._group.pidfds, *self._frontends.pidfds}
        if wanted == self._watched:
            return
        for fd in self._watched - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._watched:
            self._poller.register(fd, zmq.POLLIN)
        self._watched = wanted


def _metrics(port: int | None) -> Metrics | None:
    """Raises ConfigError."""
    try:
        return None if port is None else Metrics(port)
    except OSError as error:
        raise ConfigError(f"metrics_port {port}: {error.strerror}") from None
