"""Real processes killed and stopped while streams run: every stream goes on, token for token what it had to be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.engine_rig import LIVENESS_S, RigFrontend, RoleProcess, engine_thread, scheduler_process, worker_process

from pagecast_scheduler.engine.processes import is_alive, own_pid_namespace
from pagecast_wire.intake import ServingState
from pagecast_wire.sampling import Constraint, ConstraintKind

STEP_US = 3000
"""Time that the oracle takes for a step: long enough that a signal finds streams in the middle."""


@contextmanager
def _processes(*processes: RoleProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.close()


def _gone(pid: int) -> bool:
    """A zombie whose parent has not yet waited for it counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def _wait_gone(pid: int) -> None:
    end = time.monotonic() + LIVENESS_S
    while not _gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        os.sched_yield()
        time.sleep(0.01)  # the test's own look, nothing is synchronised by it


def _start_streams(frontend: RigFrontend, count: int = 8, n: int = 500) -> list[int]:
    keys = [frontend.submit([i] * (5 * i + 1), n, seed=i) for i in range(count)]
    frontend.pump(lambda: all(len(frontend.tokens.get((key, 0), [])) >= 5 for key in keys), "every stream has begun")
    return keys


def _end_streams(frontend: RigFrontend, keys: list[int]) -> None:
    frontend.wait_finished(*keys)
    for key in keys:
        frontend.expect(key)
    frontend.pump(lambda: frontend.status is not None and frontend.status.num_blocks_referenced == 0, "blocks are free")
    frontend.wait_serving()


def test_worker_killed_mid_step(tmp_path: Path) -> None:
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    with _processes(worker), engine_thread(tmp_path):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        worker.kill()
        _end_streams(frontend, keys)
        assert len(worker.pids) == 2 and ServingState.RECOVERING in frontend.states
        assert frontend.status is not None and frontend.status.epoch == 2
        assert frontend.finished[keys[0], 0].usage.num_recoveries == 1
        frontend.close()


def test_worker_killed_many_times(tmp_path: Path) -> None:
    """More often than is free of charge: the brake delays, no stream is given up."""
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    with _processes(worker), engine_thread(tmp_path):
        frontend = RigFrontend(tmp_path).wait_serving()
        key = frontend.submit([1, 2, 3], 240)
        for life in range(1, 7):
            frontend.pump(lambda life=life: len(frontend.tokens.get((key, 0), [])) >= 30 * life, "progress in every life")
            worker.kill()
            worker.wait_spawned(life + 1)
        _end_streams(frontend, [key])
        frontend.close()


def test_one_of_three_ranks_killed_takes_the_whole_group(tmp_path: Path) -> None:
    ranks = [worker_process(tmp_path, rank, 3, oracle_step_us=STEP_US) for rank in range(3)]
    with _processes(*ranks), engine_thread(tmp_path, tensor_parallel_size=3):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        ranks[1].kill()
        _end_streams(frontend, keys)
        assert [len(rank.pids) for rank in ranks] == [2, 2, 2]
        frontend.close()


def test_constrained_streams_go_on_once_the_new_group_has_compiled(tmp_path: Path) -> None:
    """Every rank is asked before a row comes, and the new ones are asked again: for streams that ran, and for one that waited."""
    constraint = Constraint(ConstraintKind.REGEX, "[0-9]+")
    ranks = [worker_process(tmp_path, rank, 2, oracle_step_us=STEP_US) for rank in range(2)]
    with _processes(*ranks), engine_thread(tmp_path, tensor_parallel_size=2):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit([i] * (5 * i + 1), 500, seed=i, constraint=constraint) for i in range(4)]
        keys.append(frontend.submit([7] * 20, 500, seed=9))
        frontend.pump(lambda: all(len(frontend.tokens.get((key, 0), [])) >= 5 for key in keys), "every stream has begun")
        keys.append(frontend.submit([8] * 9, 40, seed=8, constraint=Constraint(ConstraintKind.JSON_OBJECT)))
        ranks[1].kill()
        _end_streams(frontend, keys)
        assert [len(rank.pids) for rank in ranks] == [2, 2]
        frontend.close()


def test_hung_rank_is_killed_after_the_step_deadline(tmp_path: Path) -> None:
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    with _processes(worker), engine_thread(tmp_path, step_deadline_s=4.0):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        hung = worker.process.pid
        worker.kill(signal.SIGSTOP)
        frontend.pump(lambda: frontend.states[-1] in (ServingState.STALLED, ServingState.RECOVERING), "not healthy while nothing moves")
        _end_streams(frontend, keys)
        assert ServingState.STALLED in frontend.states and _gone(hung)
        frontend.close()


def test_hung_rank_without_work_is_found_by_its_silence(tmp_path: Path) -> None:
    ranks = [worker_process(tmp_path, rank, 2) for rank in range(2)]
    with _processes(*ranks), engine_thread(tmp_path, tensor_parallel_size=2, heartbeat_timeout_s=5.0):
        frontend = RigFrontend(tmp_path).wait_serving()
        before = frontend.status.epoch if frontend.status else 0
        ranks[1].kill(signal.SIGSTOP)
        frontend.pump(lambda: frontend.status is not None and frontend.status.epoch > before > 0, "a new epoch")
        key = frontend.submit([1], 20)
        _end_streams(frontend, [key])
        frontend.close()


def test_scheduler_killed_workers_are_adopted_and_streams_go_on(tmp_path: Path) -> None:
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    scheduler = scheduler_process(tmp_path)
    with _processes(scheduler, worker):
        frontend, other = RigFrontend(tmp_path).wait_serving(), RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        others = _start_streams(other, 3)
        slot = frontend.slot
        scheduler.kill()
        scheduler.wait_spawned(2)
        other.pump(lambda: other.num_resubmits > 0, "the other front end brings its requests back")
        _end_streams(frontend, keys)
        _end_streams(other, others)
        assert frontend.num_resubmits > 0 and frontend.slot == slot
        assert len(worker.pids) == 1, "the worker kept its weights"
        assert frontend.status is not None and frontend.status.epoch > 1
        late = RigFrontend(tmp_path).wait_serving()
        assert late.slot not in (frontend.slot, other.slot), "a slot is given away once"
        for each in (frontend, other, late):
            each.close()


def test_scheduler_and_worker_killed_together(tmp_path: Path) -> None:
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    scheduler = scheduler_process(tmp_path)
    with _processes(scheduler, worker):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        scheduler.kill()
        worker.kill()
        _end_streams(frontend, keys)
        assert frontend.num_resubmits > 0
        frontend.close()


def test_scheduler_stopped_for_a_while_blames_nobody(tmp_path: Path) -> None:
    """Longer than a step may take and than a heartbeat may be late."""
    worker = worker_process(tmp_path, oracle_step_us=STEP_US)
    scheduler = scheduler_process(tmp_path, step_deadline_s=4.0, heartbeat_timeout_s=5.0)
    with _processes(scheduler, worker):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend)
        scheduler.kill(signal.SIGSTOP)
        time.sleep(8.0)  # the fault itself: a scheduler that does not run
        scheduler.kill(signal.SIGCONT)
        _end_streams(frontend, keys)
        assert len(worker.pids) == 1 and frontend.status is not None and frontend.status.epoch == 1
        frontend.close()


def test_front_end_killed_its_requests_end_and_blocks_are_free(tmp_path: Path) -> None:
    worker = worker_process(tmp_path, oracle_step_us=4 * STEP_US)
    with _processes(worker), engine_thread(tmp_path):
        watcher = RigFrontend(tmp_path).wait_serving()
        code = (
            f"from pathlib import Path; import os; from e2e.engine_rig import RigFrontend\n"
            f"f = RigFrontend(Path({str(tmp_path)!r}), pid=os.getpid()).wait_serving()\n"
            "keys = [f.submit([i] * 40, 2000) for i in range(4)]\n"
            "f.pump(lambda: len(f.tokens) == 4)\nprint('running', flush=True)\nf.pump(lambda: False)"
        )
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        victim = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None and victim.stdout.readline() == "running\n"
        watcher.pump(lambda: watcher.status is not None and watcher.status.num_running == 4, "four are running")
        key = watcher.submit([7] * 30, 60)
        victim.kill()
        victim.wait()
        watcher.pump(lambda: watcher.status is not None and watcher.status.num_running <= 1, "its requests end")
        _end_streams(watcher, [key])
        victim.stdout.close()
        watcher.close()


def test_stopped_scheduler_leaves_in_order_and_workers_live_on(tmp_path: Path) -> None:
    worker = worker_process(tmp_path)
    scheduler = scheduler_process(tmp_path, respawn=False)
    with _processes(scheduler, worker):
        frontend = RigFrontend(tmp_path).wait_serving()
        scheduler.kill(signal.SIGTERM)
        scheduler.thread.join(LIVENESS_S)
        assert scheduler.exit_codes == [0]
        assert is_alive(worker.process.pid, own_pid_namespace()) and len(worker.pids) == 1
        again = scheduler_process(tmp_path, respawn=False)
        with _processes(again):
            frontend.pump(lambda: ServingState.DRAINING in frontend.states, "it said that it was leaving")
            frontend.wait_serving()
            key = frontend.submit([1], 30)
            frontend.wait_finished(key)
            frontend.expect(key)
            assert len(worker.pids) == 1
        frontend.close()


def test_condemned_ranks_leave_no_process_behind(tmp_path: Path) -> None:
    """The rest of a group that lost a rank is killed, also a rank that no longer reads its socket."""
    ranks = [worker_process(tmp_path, rank, 2, oracle_step_us=STEP_US) for rank in range(2)]
    with _processes(*ranks), engine_thread(tmp_path, tensor_parallel_size=2):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = _start_streams(frontend, 2)
        first = [rank.process.pid for rank in ranks]
        ranks[1].kill(signal.SIGSTOP)
        ranks[0].kill()
        for pid in first:
            _wait_gone(pid)
        _end_streams(frontend, keys)
        frontend.close()
