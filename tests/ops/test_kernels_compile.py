"""Every kernel compiles for a GPU that is not there, fits its shared memory, none in attention spills and none rounds float32 to TF32.

The interpreter is off for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagecast_kernels import configs

ROOT = Path(__file__).parents[2]


def outside_the_interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a Python of these arguments says that finds the kernels and what checks them."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(ROOT / "kernels")
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("arch", "only"), [(90, ""), (89, "paged"), (89, "float32"), (80, "paged"), (100, "paged")])
def test_kernels_compile(arch: int, only: str) -> None:
    """All of them for Hopper, attention for every kind that there is a table for, all of float32 where programs may have least memory."""
    done = outside_the_interpreter(str(ROOT / "kernels/compile_check.py"), "--arch", str(arch), "--only", only)
    assert done.returncode == 0 and "paged_prefill" in done.stdout, done.stdout + done.stderr


ROWS_OF_A_TABLE = """
import torch, compile_check
from pagecast_kernels import sampling

compiled = compile_check.compile_only(90)
for batch in (1, 2, 4):
    floats, ids = torch.zeros((3, batch)), torch.zeros((4, batch), dtype=torch.int32)  # packed: a batch of one begins anywhere
    logits, seeds = torch.zeros((batch, 1024), dtype=torch.bfloat16), torch.zeros(batch, dtype=torch.int64)
    sampling.sample(logits, floats[0], ids[1], floats[1], floats[2], seeds, ids[2], ids[3], out=ids[0])
for name in sorted({kernel.metadata.name for kernel in compiled}):
    print(name, len({kernel.hash for kernel in compiled if kernel.metadata.name == name}))
"""


def test_where_a_batch_begins_in_memory_compiles_nothing_anew() -> None:
    """Else the kernels that are compiled ahead, for tensors without memory, are not the ones that a batch of one needs."""
    done = outside_the_interpreter("-c", ROWS_OF_A_TABLE)
    assert dict(line.split() for line in done.stdout.splitlines()) == {
        "_bound": "1", "_pick": "1", "_narrow": "1", "_choose": "1", "_finish_open_rows": "1",
    }, done.stdout + done.stderr  # fmt: skip


def test_a_check_on_a_gpu_compiles_the_small_kernels_ahead_without_one() -> None:
    done = outside_the_interpreter("-c", "import gpu_check; print(repr(gpu_check.compile_job(None)))")
    assert done.stdout == "''\n", done.stdout + done.stderr


def test_launches_are_smaller_where_there_is_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    of_hopper = configs.prefill(128, "cpu"), configs.decode_flat(1, 8, 128, "cpu"), configs.latent_prefill("cpu")
    monkeypatch.setattr(configs, "arch", lambda device: 89)
    small = configs.prefill(128, "cpu"), configs.decode_flat(1, 8, 128, "cpu"), configs.latent_prefill("cpu")
    for more, less in zip(of_hopper, small, strict=True):
        assert less.tile * less.stages < more.tile * more.stages or less.rows < more.rows
    with pytest.raises(configs.UnsupportedError, match="99: use 16 bits"):
        configs.latent_prefill("cpu", torch.float32.itemsize)


def test_an_unknown_gpu_has_the_least_shared_memory() -> None:
    assert configs.shared_memory_of(75) == configs.shared_memory_of(121) == 99 * 1024 < configs.shared_memory_of(80)


def test_a_gpu_without_e4m3_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    configs.check_e4m3("cpu")
    monkeypatch.setattr(configs, "arch", lambda device: 80)
    with pytest.raises(configs.UnsupportedError, match=r"8\.9 or more, this one has 8\.0"):
        configs.check_e4m3("cpu")
