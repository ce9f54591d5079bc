"""What the running engine records, over its sockets and with its clock, replays to the very plans it sent."""

from pathlib import Path

from e2e.engine_rig import RigFrontend, engine_thread, rig_workers

from pagecast_scheduler.engine.recorder import Recorder
from pagecast_scheduler.engine.replay import replay


def test_a_recording_of_the_engine_replays(tmp_path: Path) -> None:
    """With preemptions, cancels, and requests that time ends while nothing else happens."""
    path = tmp_path / "engine.rec"
    recorder = Recorder(str(path), with_tokens=True)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
    with engine_thread(tmp_path, record=recorder, **limits), rig_workers(tmp_path, 1, num_blocks=24) as (worker,):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit([i % 3] * 20, 60, seed=i) for i in range(8)]
        late = [frontend.submit([7] * 30, 100, seed=90 + i, time_budget_ms=1 + i) for i in range(4)]
        gone = [frontend.submit([9, i], 100, seed=70 + i) for i in range(3)]
        frontend.abort(*gone)
        frontend.wait_finished(*keys, *late, *gone)
        for key in keys:
            frontend.expect(key)
        frontend.close()
        plans = len(worker.plans)
    result = replay(path)
    assert result.compared and result.difference is None, result.difference
    assert result.num_plans >= plans
    assert result.num_requests >= len(keys) + len(late) + len(gone)
