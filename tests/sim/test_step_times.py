"""From a recording: how long steps of each kind took on the device, and how much later than that their results came."""

from pathlib import Path

import pytest

from pagecast.cli import replay as command
from pagecast_scheduler.engine.recorder import MAGIC, Recorder
from pagecast_scheduler.engine.replay import RecordingError
from pagecast_scheduler.engine.step_times import BOUNDS, step_times, table
from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import StepResult


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A prefill of 300 tokens with one row, two decode steps of two rows planned behind it, and after a pause a plan of three steps; the
    last plan's result never comes, as when its worker died. Times in microseconds."""
    path = tmp_path / "rec"
    recorder = Recorder(str(path), with_tokens=False)
    recorder.plan(1_000, StepPlan(1, 1, chunk_rows=pack_u32([0, 1]), chunk_starts=pack_u32([0, 0]), chunk_lengths=pack_u32([200, 100])))
    recorder.plan(2_000, StepPlan(1, 2))
    recorder.result(13_500, result(1, 1, 12_000))
    recorder.plan(14_000, StepPlan(1, 3))
    recorder.plan(14_000, None)
    recorder.result(18_500, result(2, 2, 4_900))
    recorder.result(24_000, result(3, 2, 5_100))
    recorder.plan(54_000, StepPlan(1, 4, num_steps=3))
    recorder.result(66_000, result(4, 6, 11_000))
    recorder.plan(66_000, StepPlan(1, 5))
    recorder.close()
    return path


def result(step: int, samples: int, device_us: int) -> StepResult:
    return StepResult(1, step, 0, tokens=pack_u32(range(samples)), flags=bytes(samples), device_us=device_us)


def test_steps_are_counted_by_kind(recording: Path) -> None:
    times = step_times(recording)
    assert set(times.kinds) == {(True, 512), (False, 4)}
    prefill, decode = times.kinds[True, 512], times.kinds[False, 4]
    assert (prefill.num_plans, prefill.num_rows, prefill.num_prompt_tokens) == (1, 1, 300)
    assert (prefill.device_us, prefill.elapsed_us) == (12_000, 12_500)
    assert (decode.num_plans, decode.num_rows, decode.num_prompt_tokens) == (3, 6, 0)
    assert (decode.device_us, decode.elapsed_us) == (4_900 + 5_100 + 11_000, 5_000 + 5_500 + 12_000)
    assert times.idle_us == 30_000


def test_the_table_has_a_line_for_each_kind_and_their_sum(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.show_times(str(recording)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == table(step_times(recording)) and len(lines) == 5
    assert [line[:26].strip() for line in lines[1:4]] == ["2 to 4 rows", "257 to 512 prompt tokens", "all"]
    assert lines[1].split()[-6:] == ["2.0", "0.0", "7.000", "7.500", "0.022", "93.3%"]
    assert lines[4] == "nothing under way: 0.030 s"


@pytest.mark.parametrize(
    ("tokens", "name"), [(1, "1 prompt token"), (256, "256 prompt tokens"), (20_000, f"over {BOUNDS[-1]} prompt tokens")]
)
def test_sizes_are_named(tmp_path: Path, tokens: int, name: str) -> None:
    recorder = Recorder(str(tmp_path / "rec"), with_tokens=False)
    recorder.plan(1, StepPlan(1, 1, chunk_rows=pack_u32([0]), chunk_starts=pack_u32([0]), chunk_lengths=pack_u32([tokens])))
    recorder.result(2, result(1, 0, 1))
    recorder.close()
    assert table(step_times(tmp_path / "rec"))[1][:26].strip() == name


@pytest.mark.parametrize("content", [b"", MAGIC, MAGIC + b"\x02\0\0\0\xc1\xc1"])
def test_other_files_are_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        step_times(path)
    assert command.show_times(str(path)) == 1 and command.show_times(str(tmp_path / "none")) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
