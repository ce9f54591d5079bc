"""The run directory: private, exclusive, short enough for sockets, removed at the end; and the restart budget."""

import os
import tempfile
from pathlib import Path

import pytest

from pagecast_scheduler.launch.restarts import RestartBudget, RestartPolicy
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir


def test_a_fresh_one_is_private_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RunDir.take() as first, RunDir.take() as second:
        assert first.path != second.path and first.path.stat().st_mode & 0o777 == 0o700
        (first.path / "workers.ipc").touch()
    assert not list(tmp_path.iterdir())


def test_deep_temporary_folders_are_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with RunDir.take() as taken:
        assert len(os.fsencode(taken.path / "frontends.ipc")) <= 107


def test_leftovers_of_killed_clusters_are_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, strange = tmp_path / "pagecast-old", tmp_path / "pagecast-strange"
    for folder in (abandoned, strange):
        folder.mkdir()
        (folder / "workers.ipc").touch()
    (abandoned / "supervisor.lock").write_text("1\n")
    with RunDir.take() as living, RunDir.take():
        assert living.path.exists() and strange.exists() and not abandoned.exists()


def test_a_taken_one_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with RunDir.take(str(tmp_path / "run")):
        with pytest.raises(LaunchError, match=f"in use by process {os.getpid()}") as caught:
            RunDir.take(str(tmp_path / "run"))
        assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    RunDir.take(str(tmp_path / "run")).close()


def test_a_given_folder_is_kept_and_tidied(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    (folder / "keep.txt").touch()
    (folder / "workers.ipc").touch()
    with RunDir.take(str(folder)):
        assert not (folder / "workers.ipc").exists()
        (folder / "frontend-0.serving").touch()
    assert [path.name for path in folder.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize("case", ["too long", "no parent", "a file", "open to others"])
def test_unusable_ones_are_one_clear_line(tmp_path: Path, case: str) -> None:
    path = {
        "too long": tmp_path / ("x" * 107),
        "no parent": tmp_path / "missing" / "run",
        "a file": tmp_path / "file",
        "open to others": tmp_path / "open",
    }[case]
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(LaunchError) as caught:
        RunDir.take(str(path))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    words = {"too long": "107", "no parent": "No such file", "a file": "mode 0700", "open to others": "mode 0700"}
    assert words[case] in str(caught.value)


def test_the_restart_delay_doubles_and_the_budget_ends() -> None:
    budget = RestartBudget(RestartPolicy(budget=4, window_s=60, first_delay_s=1, max_delay_s=5))
    assert [budget.died(now) for now in (0, 1, 2, 3, 4)] == [1, 2, 4, 5, None]
    assert budget.died(61.5) == 4, "the deaths at 0 and 1 are forgotten by then"
