"""A scheduler that starts where another one served: whom it waits for, in which order it takes requests, how it leaves."""

import signal
from pathlib import Path

import pytest
from e2e.engine_rig import LIVENESS_S, RigFrontend, engine_thread, rig_workers, scheduler_process

from pagecast_scheduler.engine import loop
from pagecast_scheduler.engine.recovery import SECOND
from pagecast_scheduler.engine.run_state import load
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import ServingState
from pagecast_wire.sampling import FinishReason


def _first_tokens(worker: object) -> list[int]:
    """First token of every admission of the last epoch, in order, without the warm-up's."""
    epoch = worker.starts[-1].epoch  # type: ignore[attr-defined]
    plans = [plan for plan in worker.plans if plan.epoch == epoch]  # type: ignore[attr-defined]
    return [int(view_u32(a.tokens)[0]) for plan in plans for a in plan.admissions if len(a.tokens) > 4]


def test_requests_of_before_come_first_and_new_ones_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "HOLD", 60 * SECOND)
    with rig_workers(tmp_path, 1) as (worker,):
        with engine_thread(tmp_path):
            old = RigFrontend(tmp_path).wait_serving()
            worker.hold_after = 12
            key = old.submit([77, 1], 1500)
            old.pump(lambda: len(old.tokens.get((key, 0), [])) > 5, "tokens")
            seen = len(old.tokens[key, 0])
        worker.hold_after = None
        with engine_thread(tmp_path):
            new = RigFrontend(tmp_path)
            new.pump(lambda: new.welcome is not None, "welcome")
            assert new.slot not in (old.slot, -1)
            first, cancelled = new.submit([88, 1], 10), new.submit([99, 1], 10)
            new.abort(cancelled)
            assert not new.accepted
            old.pump(lambda: old.num_resubmits == 1 and len(old.tokens[key, 0]) > seen, "the old stream goes on")
            new.wait_finished(first, cancelled)
            assert _first_tokens(worker)[0] == 77 and 99 not in _first_tokens(worker)
            assert new.finished[cancelled, 0].reason == FinishReason.CANCELLED
            new.expect(first)
            assert old.num_resubmits == 1
            old.abort(key)
            old.wait_finished(key)
            new.close()
        old.close()


def test_a_front_end_that_does_not_come_back_is_waited_for_only_so_long(tmp_path: Path) -> None:
    with rig_workers(tmp_path, 1):
        with engine_thread(tmp_path):
            gone = RigFrontend(tmp_path).wait_serving()
            gone.submit([1], 1500)
            gone.pump(lambda: bool(gone.tokens), "tokens")
        gone.close()
        assert [f.slot for f in load(str(tmp_path)).frontends] == [gone.slot]
        with engine_thread(tmp_path):
            new = RigFrontend(tmp_path).wait_serving()
            key = new.submit([2], 10)
            new.wait_finished(key)
            new.expect(key)
            assert new.slot == gone.slot + 1
            new.close()


def test_epochs_and_slots_go_on_above_the_old_ones(tmp_path: Path) -> None:
    epochs, slots = [], []
    for _ in range(2):
        with engine_thread(tmp_path), rig_workers(tmp_path, 1) as (worker,):
            frontend = RigFrontend(tmp_path)
            frontend.pump(lambda frontend=frontend: frontend.slot > 0, "a slot")
            frontend.wait_serving()
            epochs.append(worker.starts[-1].epoch)
            slots.append(frontend.slot)
            frontend.close()
    assert epochs == sorted(set(epochs)) and slots == sorted(set(slots))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting_for_workers_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    scheduler = scheduler_process(tmp_path, respawn=False)
    frontend = RigFrontend(tmp_path)
    frontend.pump(lambda: frontend.states == [ServingState.STARTING], "STARTING")
    scheduler.kill(number)
    scheduler.thread.join(LIVENESS_S)
    assert scheduler.exit_codes == [0]
    frontend.pump(lambda: frontend.states[-1] == ServingState.DRAINING, "DRAINING")
    frontend.close()
