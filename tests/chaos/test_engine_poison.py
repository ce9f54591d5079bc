"""A request that crashes every worker it meets is found and ended; its neighbours do not notice."""

import threading
import time
from pathlib import Path

import pytest
from e2e.engine_rig import RigFrontend, RigWorker, engine_thread

from pagecast_wire.codec import view_u32
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import WorkerFault
from pagecast_wire.sampling import FinishReason

POISON = 666


class _Fragile(RigWorker):
    """Fails at the first plan that admits a request with the poisonous token."""

    kind = "step"

    def _take(self, message: object) -> None:
        if isinstance(message, StepPlan) and any(POISON in view_u32(admission.tokens) for admission in message.admissions):
            self.send(WorkerFault(self.rank, message.epoch, message.step, self.kind, "RuntimeError: poison"))
            self.stopped.set()  # a process that died of it
        else:
            super()._take(message)


class _Small(_Fragile):
    """Runs out of the device's memory instead."""

    kind = "out_of_memory"


@pytest.mark.parametrize(("worker", "end"), [(_Fragile, FinishReason.POISON_REQUEST), (_Small, FinishReason.STEP_MEMORY)])
def test_poison_is_isolated_and_neighbours_are_exact(tmp_path: Path, worker: type[RigWorker], end: FinishReason) -> None:
    over = threading.Event()
    lives: list[RigWorker] = []

    def supervise() -> None:
        while not over.is_set():
            lives.append(worker(tmp_path))
            lives[-1].start()
            lives[-1].join()
            while engine._group.is_open and not over.is_set():  # a process takes longer than that to start
                time.sleep(0.005)

    with engine_thread(tmp_path) as engine:
        supervisor = threading.Thread(target=supervise, daemon=True)
        supervisor.start()
        frontend = RigFrontend(tmp_path).wait_serving()
        good = [frontend.submit([i, 2], 1000, seed=i) for i in range(5)]
        frontend.pump(lambda: all(frontend.tokens.get((key, 0)) for key in good), "neighbours run")
        bad = frontend.submit([3, POISON], 10)
        frontend.wait_finished(bad, *good)
        assert frontend.finished[bad, 0].reason == end
        for key in good:
            assert frontend.finished[key, 0].reason == FinishReason.LENGTH
            frontend.expect(key)
        over.set()
        while supervisor.is_alive():  # one more may just be starting
            lives[-1].quit.set()
            supervisor.join(0.1)
        assert len(lives) >= 3
        frontend.close()
