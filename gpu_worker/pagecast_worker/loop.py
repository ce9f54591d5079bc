"""The worker's one loop: plans in, executor, results out. Decides nothing but the order, which is the link's.

While the device works the loop goes on receiving, so that the next plan is queued behind the running one; it waits in short
sleeps then, and in a blocking poll when nothing is in flight.
"""

import os
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

import structlog
import zmq

from pagecast_wire import log_lines
from pagecast_wire.intake import HelloWanted
from pagecast_wire.plan import LogLevel, PrepareConstraint, StartEpoch, StepPlan, StopWorker, ToWorker
from pagecast_wire.result import ConstraintPrepared, PlanGap, StepResult
from pagecast_wire.sampling import ConstraintFault
from pagecast_worker.executor import Executor
from pagecast_worker.link import Completed, Link, PlanOrder, Verdict

_SHORTEST_NAP_S: Final = 20e-6
_NAP_SHARE: Final = 0.02
"""Between two looks while the device works the loop sleeps for this share of the time waited so far: a step's result is seen at most
so much late, and a long step does not cost a core."""

_FINISH_S: Final = 3.0
_FINISH_NAP_S: Final = 0.001

_log = structlog.get_logger(__name__)


class Loop:
    """Runs until told to stop. Owns the count of plans in flight, and (epoch, step) last worked on, for a fault's report."""

    def __init__(self, link: Link, executor: Executor, rank: int) -> None:
        self.link, self.executor, self.rank = link, executor, rank
        self.order = PlanOrder()
        self.in_flight = 0
        self.current = (0, 0)
        self.stopping = False
        self._answers: SimpleQueue[ConstraintPrepared] = SimpleQueue()
        self.refusal = ""  # why the scheduler does not want this rank

    def stop(self) -> None:
        """Ask the loop to end; whoever calls it from elsewhere also writes to the link's wake pipe."""
        self.stopping = True

    def run(self) -> None:
        """Raises whatever the executor raises; the caller reports it as a fault."""
        poller = zmq.Poller()
        poller.register(self.link.socket, zmq.POLLIN)
        poller.register(self.link.wake_fd, zmq.POLLIN)
        waiting_since = time.monotonic()
        while not self.stopping:
            if not self.in_flight:
                poller.poll()
            elif not poller.poll(0) and not self._send_results():
                time.sleep(max(_SHORTEST_NAP_S, _NAP_SHARE * (time.monotonic() - waiting_since)))
                continue
            waiting_since = time.monotonic()
            for message in self.link.receive():
                self._handle(message)
            self._send_answers()
            self._send_results()

    def _handle(self, message: ToWorker) -> None:
        match message:
            case StepPlan():
                self._take(message)
            case StartEpoch():
                self._start_epoch(message)
            case PrepareConstraint():
                self.executor.prepare(message.constraint, self._prepared)
            case HelloWanted():
                _log.info("the scheduler asks for a hello", last_epoch=self.order.epoch)
                self.link.hello_again(self.order.epoch)
            case LogLevel(level=level):
                log_lines.set_level(level or self.link.config.log_level)
            case StopWorker():
                self.refusal = message.reason
                self._finish()
                self.stopping = True

    def _prepared(self, digest: bytes, fault: ConstraintFault) -> None:
        """From any thread: the answer is sent by the loop's own, which this wakes."""
        self._answers.put(ConstraintPrepared(self.rank, digest, fault))
        with suppress(BlockingIOError, OSError):  # full: it is awake; closed: nobody waits
            os.write(self.link.wake_write_fd, b"\0")

    def _send_answers(self) -> None:
        while not self._answers.empty():
            self.link.send(self._answers.get())

    def _take(self, plan: StepPlan) -> None:
        verdict = self.order.judge(plan.epoch, plan.step)
        if verdict is Verdict.APPLY:
            self.current = (plan.epoch, plan.step)
            self.executor.submit(plan)
            self.in_flight += 1
            self._send_results()  # a synchronous executor is done now; do not let the result wait for the next plan
        elif verdict is Verdict.GAP:
            _log.warning("a plan is missing", epoch=plan.epoch, step=plan.step, last_step=self.order.last_step)
            self.link.send(PlanGap(epoch=self.order.epoch, rank=self.rank, last_step=self.order.last_step))

    def _start_epoch(self, start: StartEpoch) -> None:
        if self.order.start_epoch(start.epoch):
            while self.in_flight:  # of the epoch before: nobody waits for them
                self.executor.collect(wait=True)
                self.in_flight -= 1
            self.executor.start_epoch(start)
            self.link.completed = Completed(start.epoch, 0)
            _log.info("epoch started", epoch=start.epoch, num_blocks=start.num_blocks)

    def _finish(self) -> None:
        """Send the results of what is in flight, as far as it ends: without another rank a step never does."""
        deadline = time.monotonic() + _FINISH_S
        while self.in_flight and time.monotonic() < deadline:
            if not self._send_results():
                time.sleep(_FINISH_NAP_S)

    def _send_results(self) -> bool:
        """Send every result that is ready; whether there was one."""
        sent = False
        while self.in_flight:
            self.current = (self.order.epoch, self.link.completed.step + 1)
            if (result := self.executor.collect(wait=False)) is None:
                break
            self.in_flight -= 1
            self.link.completed = Completed(result.epoch, result.step)
            self.link.send(result if self.rank == 0 else _without_tokens(result))
            sent = True
        return sent


def _without_tokens(result: StepResult) -> StepResult:
    """What a rank other than 0 reports: that the step is done. Every rank samples the same tokens."""
    return StepResult(epoch=result.epoch, step=result.step, rank=result.rank, device_us=result.device_us)
