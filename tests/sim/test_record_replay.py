"""A recorded run makes the same plans again without a worker; a run that does not is told apart at its first difference."""

from pathlib import Path

import msgspec
import pytest
from sim.paces import small_paces
from sim.scenario import BATCHES, draw
from sim.world import World

from pagecast.cli import replay as command
from pagecast_scheduler.core import policy
from pagecast_scheduler.engine import recorder as recording
from pagecast_scheduler.engine.recorder import Recorder
from pagecast_scheduler.engine.replay import RecordingError, compare, read, replay
from pagecast_wire import log_lines
from pagecast_wire.plan import StepPlan

SEEDS = range(40)


def record(seed: int, path: Path, with_tokens: bool = True) -> World:
    recorder = Recorder(str(path), with_tokens)
    world = World(draw(seed), recorder)
    world.run()
    recorder.close()
    assert not recorder.error
    return world


def busy_seed(path: Path, with_tokens: bool = True) -> World:
    """A run with many plans and preemptions, recorded; none that paces prefill at the simulator's size, as a replay by itself does not."""
    for seed in range(500):
        world = World(draw(seed))
        if BATCHES not in world.scenario.features and world.run().num_preemptions >= 2 and world.audit.num_plans > 20:
            return record(seed, path, with_tokens)
    raise AssertionError("no busy seed")


def test_every_run_replays_to_the_same_plans(tmp_path: Path) -> None:
    for seed in SEEDS:
        path = tmp_path / f"{seed}.rec"
        world = record(seed, path)
        with small_paces():
            result = replay(path)
        assert result.difference is None, f"seed {seed}: {result.difference}"
        assert result.num_plans == world.audit.num_plans
        assert len(result.timeline) == result.num_plans


def test_a_changed_policy_is_found_at_its_first_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.rec"
    busy_seed(path)
    monkeypatch.setattr(policy, "admission_fits", lambda needed, num_free, num_reserved, num_active: not num_active)
    difference = replay(path).difference
    assert difference is not None
    assert difference.field in ("admissions", "plan")
    assert difference.recorded != difference.now


def test_a_changed_plan_is_named_by_step_and_field(tmp_path: Path) -> None:
    plan = StepPlan(epoch=3, step=7, grown_rows=b"\x01\0\0\0", grown_blocks=b"\x05\0\0\0")
    other = msgspec.structs.replace(plan, grown_blocks=b"\x06\0\0\0")
    difference = compare(plan, other)
    assert difference is not None
    assert (difference.epoch, difference.step, difference.field) == (3, 7, "grown_blocks")
    assert (difference.recorded, difference.now) == ("[5]", "[6]")
    assert compare(plan, plan) is None and compare(None, None) is None
    missing = compare(plan, None)
    assert missing is not None and missing.field == "plan"


def test_without_token_ids_none_is_in_the_file(tmp_path: Path) -> None:
    """Prompts and outputs are counts; a run is still shown."""
    with_ids, without = tmp_path / "with.rec", tmp_path / "without.rec"
    world = busy_seed(with_ids)
    record(world.scenario.seed, without, with_tokens=False)
    for plan in world.scenario.requests:
        if len(plan.prompt) >= 6:
            column = b"".join(token.to_bytes(4, "little") for token in plan.prompt)
            assert column in with_ids.read_bytes()
            assert column not in without.read_bytes()
    result = replay(without)
    assert not result.compared and result.difference is None
    assert result.num_plans == replay(with_ids).num_plans
    assert max(moment.num_blocks for moment in result.timeline) > 0


def test_tenants_are_not_named(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    recorder = Recorder(str(path), with_tokens=True)
    plan = msgspec.structs.replace(draw(1).requests[0].submit(), tenant="alice@example.com")
    recorder.arrival(1, plan)
    recorder.close()
    assert b"alice" not in path.read_bytes()


def test_a_file_cut_short_is_good_up_to_its_last_frame(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    busy_seed(path)
    whole = replay(path).num_plans
    data = path.read_bytes()
    cut = tmp_path / "cut.rec"
    cut.write_bytes(data[: len(data) * 2 // 3])
    result = replay(cut)
    assert result.difference is None
    assert 0 < result.num_plans < whole


@pytest.mark.parametrize("content", [b"", b"not a recording", recording.MAGIC, recording.MAGIC + b"\x02\0\0\0\xc1\xc1"])
def test_other_files_are_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        replay(path)
    assert command.replay(str(path), None) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_recordings_are_private_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    busy_seed(path)
    assert path.stat().st_mode & 0o077 == 0
    times = [at for at, _, _ in read(path)]
    assert times == sorted(times)


def test_a_recording_that_is_there_is_kept(tmp_path: Path) -> None:
    """A scheduler that died is started again with the same file: the recording of its death must not go."""
    path = tmp_path / "rec"
    for _ in range(2):
        Recorder(str(path), with_tokens=True).close()
    before = tmp_path / "rec.before"
    assert before.read_bytes() and path.read_bytes()
    assert before.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_ends_the_recording_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    log_lines.configure("json", "error")
    recorder = Recorder("/dev/full", with_tokens=True)
    for at in range(3):
        recorder.control(at * 2_000_000, "fail_epoch", {})
    recorder.close()
    assert recorder.error
    assert capfd.readouterr().err.count("recording ends early") == 1


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    recorder = Recorder(str(path), with_tokens=True)
    recorder.control(0, "create", {"config": {"padding": "x" * (4 * recording.BUFFER_BYTES)}, "epoch": 1})
    assert path.stat().st_size >= 3 * recording.BUFFER_BYTES
    recorder.close()


def test_command_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "run.rec", tmp_path / "run.png"
    busy_seed(path)
    assert command.replay(str(path), str(picture)) == 0
    assert "every plan is the same" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
