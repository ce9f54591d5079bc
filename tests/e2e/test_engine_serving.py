"""From submit to tokens through the engine and its sockets, with ranks in threads."""

from pathlib import Path

import pytest
from e2e.engine_rig import RigFrontend, RigWorker, engine_thread, rig_workers

from pagecast_scheduler.engine.config import ConfigError, EngineConfig
from pagecast_scheduler.engine.epochs import Stop, effective_limits
from pagecast_wire.intake import KEY_BITS, Pause, RejectReason, ServingState
from pagecast_wire.sampling import FinishReason


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_tokens_are_the_oracles(tmp_path: Path, ranks: int) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=ranks), rig_workers(tmp_path, ranks) as workers:
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit(list(range(i, 3 * i + 5)), 10 + i, seed=i) for i in range(20)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        assert set(frontend.accepted) == set(keys)
        frontend.pump(lambda: len({len(worker.plans) for worker in workers}) == 1, "every rank has every plan")
        assert all(worker.plans == workers[0].plans for worker in workers), "every rank gets the same plans"
        frontend.close()


def test_a_small_pool_preempts_and_stays_exact(tmp_path: Path) -> None:
    with engine_thread(tmp_path, max_num_batched_tokens=64, max_num_seqs=16), rig_workers(tmp_path, 1, num_blocks=24):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit([i] * 20, 150, seed=i) for i in range(8)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        frontend.pump(lambda: frontend.status is not None and frontend.status.num_preemptions > 0, "a preemption is reported")
        frontend.close()


@pytest.mark.parametrize("fills", [True, False])
def test_sizes_that_workers_name_are_filled_unless_told_not_to(tmp_path: Path, fills: bool) -> None:
    sizes = (8, 16, 24)
    with engine_thread(tmp_path, max_num_seqs=4, fill_steps=fills) as engine, rig_workers(tmp_path, 1, step_sizes=sizes):
        frontend = RigFrontend(tmp_path).wait_serving()
        core = engine._epochs.core
        assert core is not None and core.state.config.step_sizes == (sizes if fills else ())
        keys = [frontend.submit([i] * (3 + 5 * i % 17), 12, seed=i) for i in range(16)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        frontend.close()


def test_not_serving_before_a_step_has_run(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1) as (worker,):
        frontend = RigFrontend(tmp_path)
        frontend.pump(lambda: frontend.welcome is not None, "welcome")
        frontend.wait_serving()
        assert set(frontend.states) <= {ServingState.STARTING, ServingState.SERVING}
        assert worker.plans[0].step == 1 and len(worker.plans[0].admissions) == 1
        assert frontend.tokens == {} and frontend.finished == {}, "nobody hears of the engine's own request"
        frontend.close()


def test_loading_progress_reaches_front_ends_before_the_welcome(tmp_path: Path) -> None:
    first, second = RigWorker(tmp_path, 0, 2), RigWorker(tmp_path, 1, 2)
    with engine_thread(tmp_path, tensor_parallel_size=2):
        frontend = RigFrontend(tmp_path)
        first.start()
        frontend.pump(lambda: (0, "warm-up") in frontend.load, "progress of rank 0")
        assert frontend.welcome is None and frontend.states == [ServingState.STARTING]
        second.start()
        frontend.wait_serving()
        first.quit.set()
        second.quit.set()
        frontend.close()


def test_limits_are_the_smallest_pools_and_lowered_length_is_told(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1, num_blocks=11):
        frontend = RigFrontend(tmp_path).wait_serving()
        assert frontend.welcome is not None
        assert frontend.welcome.limits.num_blocks == 11 and frontend.welcome.limits.max_model_len == 160
        key = frontend.submit([1] * 100, 61)
        frontend.wait_finished(key)
        assert frontend.rejected[key].reason == RejectReason.TOO_MANY_TOKENS and frontend.rejected[key].limit == 160
        frontend.close()


def test_abort_ends_a_request_and_frees_its_blocks(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1) as (worker,):
        frontend = RigFrontend(tmp_path).wait_serving()
        worker.hold_after = 10
        key, other = frontend.submit([5] * 40, 1900), frontend.submit([6] * 40, 30)
        frontend.pump(lambda: len(frontend.tokens.get((key, 0), [])) > 3, "tokens")
        frontend.abort(key)
        later = frontend.submit([7], 2)
        frontend.pump(lambda: later in frontend.accepted, "what was sent before is heard too")
        worker.hold_after = None
        frontend.wait_finished(key, other, later)
        assert frontend.finished[key, 0].reason == FinishReason.CANCELLED
        frontend.expect(other)
        frontend.pump(lambda: frontend.status is not None and frontend.status.num_blocks_referenced == 0, "blocks are free")
        frontend.close()


def test_a_paused_request_waits_and_goes_on(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1) as (worker,):
        frontend = RigFrontend(tmp_path).wait_serving()
        worker.hold_after = 10
        key = frontend.submit([5] * 40, 700)
        frontend.pump(lambda: len(frontend.tokens.get((key, 0), [])) > 3, "tokens")
        frontend.send(Pause(key, True))
        other = frontend.submit([7], 1000)
        frontend.pump(lambda: other in frontend.accepted, "what was sent before is heard too")
        worker.hold_after = None
        frontend.wait_finished(other)
        assert (key, 0) not in frontend.finished
        frontend.send(Pause(key, False))
        frontend.wait_finished(key)
        frontend.expect(key)
        frontend.close()


def test_two_front_ends_have_their_own_slots_and_keys(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        one, two = RigFrontend(tmp_path).wait_serving(), RigFrontend(tmp_path).wait_serving()
        assert {one.slot, two.slot} == {1, 2}
        mine, others = one.submit([1, 2], 500), two.submit([1, 2], 20)
        one.pump(lambda: len(one.tokens.get((mine, 0), [])) > 3, "tokens")
        two.abort(mine)
        stolen = two.submit([1], 1)
        two.submits[stolen] = two.submits[stolen]
        two._counter = 99
        two.slot, real = one.slot, two.slot
        forged = two.submit([3], 2)
        two.slot = real
        two.wait_finished(others, forged)
        assert two.rejected[forged].reason == RejectReason.INVALID and forged >> KEY_BITS == one.slot
        one.wait_finished(mine)
        one.expect(mine)
        two.expect(others)
        one.close()
        two.close()


def test_a_front_end_that_falls_silent_is_cancelled(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1) as (worker,):
        watcher, leaver = RigFrontend(tmp_path).wait_serving(), RigFrontend(tmp_path).wait_serving()
        worker.hold_results.set()
        leaver.submit([9] * 50, 1900)
        watcher.pump(lambda: watcher.status is not None and watcher.status.num_running == 1, "running")
        leaver.close()
        worker.hold_results.clear()
        key = watcher.submit([9] * 50, 40)
        watcher.wait_finished(key)
        watcher.expect(key)
        watcher.pump(lambda: watcher.status is not None and watcher.status.num_blocks_referenced == 0, "its blocks are free")
        watcher.close()


def test_stop_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine, rig_workers(tmp_path, 1) as (worker,):
        frontend = RigFrontend(tmp_path).wait_serving()
        worker.hold_results.set()
        key = frontend.submit([4] * 10, 100)
        frontend.pump(lambda: key in frontend.accepted, "accepted")
        engine.stop()
        frontend.pump(lambda: frontend.states[-1] == ServingState.DRAINING, "DRAINING")
        late = frontend.submit([4], 1)
        frontend.wait_finished(late)
        assert frontend.rejected[late].reason == RejectReason.DRAINING
        worker.hold_results.clear()
        frontend.wait_finished(key)
        frontend.expect(key)
        assert engine.exit_code() == 0  # type: ignore[attr-defined]
        frontend.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_delay_ms", 11), ("batch_delay_ms", -1), ("block_size", 24), ("max_num_seqs", 0), ("num_blocks", 1), ("run_dir", "x" * 120),
     ("max_num_batched_tokens", 8), ("metrics_port", 0), ("step_deadline_s", 0)],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{"run_dir": "/tmp/x", field: value})  # type: ignore[arg-type]


def test_a_pool_without_room_is_refused() -> None:
    with pytest.raises(Stop, match="1 blocks"):
        effective_limits(EngineConfig(run_dir="/tmp/x"), 1, 100)
    assert effective_limits(EngineConfig(run_dir="/tmp/x", num_blocks=8, max_model_len=50), 100, 90).max_model_len == 50
