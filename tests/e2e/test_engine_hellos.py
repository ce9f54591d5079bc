"""Who may take part: every mismatch of a hello is named and refused, and a rank that never comes is named too."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from e2e.engine_rig import LIVENESS_S, RigFrontend, RigWorker, engine_thread, rig_workers

from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.hello import foreign_build, wire_mismatch, worker_mismatch
from pagecast_scheduler.engine.link import ForeignHello, _foreign_hello
from pagecast_scheduler.engine.main import run
from pagecast_scheduler.engine.run_state import KnownFrontend, RunDirInUse, RunDirLock, RunState, load, save
from pagecast_scheduler.engine.workers import WorkerGroup
from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION
from pagecast_wire.intake import ModelFacts
from pagecast_wire.plan import LogLevel
from pagecast_wire.result import WorkerHello

FACTS = ModelFacts("m", "a", "d1", 100, 50, (0,), "float32", 1, 1, 1, 8, 0)
HELLO = WorkerHello(WIRE_VERSION, WIRE_DIGEST, "i", 1, 1, 1, 2, 0, FACTS, "c1", 10, 16)
REFERENCE = msgspec.structs.replace(HELLO, rank=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"wire_version": 9}, ("wire version 9", f"speaks {WIRE_VERSION}")),
        ({"wire_digest": "beef"}, ("wire digest beef", WIRE_DIGEST)),
        ({"world_size": 3}, ("tensor_parallel_size 3", "has 2")),
        ({"rank": 2}, ("rank 2 of 2",)),
        ({"rank": -1}, ("rank -1 of 2",)),
        ({"block_size": 32}, ("block_size 32", "has 16")),
        ({"num_blocks": 1}, ("num_blocks 1",)),
        ({"model": msgspec.structs.replace(FACTS, digest="d2")}, ("model digest d2", "rank 0 reported d1")),
        ({"model": msgspec.structs.replace(FACTS, vocab_size=7)}, ("facts about model m", "rank 0")),
        ({"config_digest": "c2"}, ("config digest c2", "rank 0 reported c1")),
    ],
)
def test_every_mismatch_is_named_with_both_values(change: dict[str, Any], named: tuple[str, ...]) -> None:
    config = EngineConfig(run_dir="/tmp/x", tensor_parallel_size=2)
    assert worker_mismatch(HELLO, config, REFERENCE) is None
    reason = worker_mismatch(msgspec.structs.replace(HELLO, **change), config, REFERENCE)
    assert reason is not None and all(part in reason for part in named)


def test_a_hello_of_another_build_is_recognised_and_named() -> None:
    data = msgspec.msgpack.encode({"type": "worker_hello", "wire_version": 1, "wire_digest": "feed", "rank": 3, "new_field": [1]})
    hello = _foreign_hello(data)
    assert hello == ForeignHello(1, "feed", 3)
    assert "feed" in foreign_build(hello)
    assert "other fields" in foreign_build(ForeignHello(WIRE_VERSION, WIRE_DIGEST, 0))
    assert wire_mismatch(WIRE_VERSION, WIRE_DIGEST) is None


def test_a_rank_of_another_build_is_told_to_stop_and_named_when_time_is_up(tmp_path: Path) -> None:
    good, bad = RigWorker(tmp_path, 0, 2), RigWorker(tmp_path, 1, 2, wire_digest="0000feed0000beef")
    good.start()  # dials before anybody listens, so that it is there as soon as the engine is
    with engine_thread(tmp_path, tensor_parallel_size=2, rank_timeout_s=5.0) as engine:
        bad.start()
        assert bad.stopped.wait(LIVENESS_S)
        assert engine.exit_code() == 1  # type: ignore[attr-defined]
        assert "rank 1" in engine.reason and "0000feed0000beef" in engine.reason and WIRE_DIGEST in engine.reason
        assert "rank 0" not in engine.reason
        good.quit.set()


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    present = RigWorker(tmp_path, 2, 4)
    present.start()  # dials before anybody listens, so that it is there as soon as the engine is
    with engine_thread(tmp_path, tensor_parallel_size=4, rank_timeout_s=5.0) as engine:
        assert engine.exit_code() == 1  # type: ignore[attr-defined]
        assert all(f"rank {r}" in engine.reason for r in (0, 1, 3)) and "rank 2" not in engine.reason
        present.quit.set()


def test_another_model_on_one_rank_is_refused_and_the_right_one_completes_the_group(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2):
        first = RigWorker(tmp_path, 0, 2)
        first.start()
        frontend = RigFrontend(tmp_path)
        other = RigWorker(tmp_path, 1, 2, config_digest="another")
        frontend.pump(lambda: (0, "warm-up") in frontend.load, "rank 0 is there")
        other.start()
        assert other.stopped.wait(LIVENESS_S)
        second = RigWorker(tmp_path, 1, 2)
        second.start()
        frontend.wait_serving()
        first.quit.set()
        second.quit.set()
        frontend.close()


def test_a_front_end_of_another_build_is_refused_by_name(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        frontend = RigFrontend(tmp_path).wait_serving()
        stranger = RigFrontend(tmp_path)
        stranger.hello(wire_digest="0123456789abcdef")
        stranger.pump(lambda: stranger.refused is not None, "refusal")
        assert stranger.refused is not None and "0123456789abcdef" in stranger.refused.reason and WIRE_DIGEST in stranger.refused.reason
        stranger.refused = None
        stranger.socket.send(msgspec.msgpack.encode({"type": "frontend_hello", "wire_version": 77, "wire_digest": "x", "more": 1}))
        stranger.pump(lambda: stranger.refused is not None, "refusal")
        assert stranger.refused is not None and "77" in stranger.refused.reason
        key = frontend.submit([1], 5)
        frontend.wait_finished(key)
        frontend.expect(key)
        frontend.close()
        stranger.close()


def test_a_second_scheduler_on_the_same_directory_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        lock = RunDirLock(str(tmp_path))
        frontend = RigFrontend(tmp_path).wait_serving()
        assert run(EngineConfig(run_dir=str(tmp_path))) == 2
        assert str(tmp_path) in capfd.readouterr().err
        with pytest.raises(RunDirInUse, match=str(tmp_path)):
            RunDirLock(str(tmp_path))
        key = frontend.submit([1], 5)
        frontend.wait_finished(key)
        frontend.expect(key)
        lock.release()
        frontend.close()
    RunDirLock(str(tmp_path)).release()


def test_run_state_survives_and_a_broken_file_counts_as_none(tmp_path: Path) -> None:
    state = RunState(7, 3, (KnownFrontend(2, "i", 1, 1),))
    assert load(str(tmp_path)) == RunState()
    save(str(tmp_path), state)
    assert load(str(tmp_path)) == state
    (tmp_path / "scheduler.state").write_bytes(b'{"epoch": "seven"')
    assert load(str(tmp_path)) == RunState()


def test_a_run_directory_that_cannot_be_used_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(EngineConfig(run_dir=str(tmp_path / "file"))) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "run_dir" in lines[0]


@pytest.mark.parametrize(("last_epoch", "level", "told"), [(0, "", []), (3, "", [""]), (0, "debug", ["debug"]), (3, "debug", ["debug"])])
def test_a_rank_is_told_the_log_level_that_holds(last_epoch: int, level: str, told: list[str]) -> None:
    """One that a scheduler before this one left may still have the level that was set there."""
    sent: list[Any] = []
    router: Any = SimpleNamespace(send=lambda identity, message: sent.append(message))
    group = WorkerGroup(EngineConfig(run_dir="/nowhere"), router, "one")
    group.set_log_level(level)
    hello = msgspec.structs.replace(HELLO, rank=0, world_size=1, pid=os.getpid(), pid_namespace=0, last_epoch=last_epoch)
    assert group.receive(b"w", hello, 0) is None and group.is_complete
    assert [message.level for message in sent if isinstance(message, LogLevel)] == told
