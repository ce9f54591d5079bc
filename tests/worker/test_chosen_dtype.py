"""`--dtype auto` on a CPU is measured once for a cluster: a worker that starts again must not go on in other numbers."""

from pathlib import Path

import torch

from pagecast_worker.backend import chosen_once


def test_the_first_choice_stays(tmp_path: Path) -> None:
    file = tmp_path / "worker.dtype"
    assert chosen_once(file, lambda: torch.bfloat16) == "bfloat16"
    assert chosen_once(file, lambda: torch.float32) == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["worker.dtype"]


def test_without_a_run_directory_nothing_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "worker.dtype"
    assert chosen_once(file, lambda: torch.float32) == "float32"
    assert chosen_once(file, lambda: torch.bfloat16) == "bfloat16"
    assert not list(tmp_path.iterdir())
