"""Launches that start early: which models have them, and that a kernel touches nothing that may be written before it has waited."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagecast_kernels import configs, early

ROOT = Path(__file__).parents[2]
GPU, CPU = torch.device("meta"), torch.device("cpu")
COMPILE = """
import json, compile_check
compiled = compile_check.compile_only(90)
for name, launch in compile_check.early_variants(90):
    if any(part in name for part in ("flat x64 h64", "hopper", "norm bfloat16", "silu_mul bfloat16", "normed bfloat16", "576 bfloat16")):
        launch()
print(json.dumps([(k.metadata.name, k.asm.get("ttir") or k.asm["ttgir"], k.asm["ptx"]) for k in compiled if k.metadata.launch_pdl]))
"""
MAY_READ = {
    "_rms_norm": {"weight_ptr"}, "_gate_mul": set(), "_gemv": set(), "_rope_and_write_kv": {"positions_ptr", "slots_ptr", "cos_sin_ptr"},
    "_decode_flat": {"count_ptr", "tiles_ptr", "blocks_ptr"}, "_decode_hopper": set(),
}
"""What each kernel may read before it waits."""


@pytest.mark.parametrize(
    ("largest", "arch", "device", "expected"),
    [
        (2 * 576 * 3072, 90, GPU, True), (2 * 576 * 3072, 120, GPU, True), (early.SMALL_WEIGHT, 90, GPU, True),
        (early.SMALL_WEIGHT + 1, 90, GPU, False), (2 * 4096 * 28672, 90, GPU, False), (None, 90, GPU, False),
        (2 * 576 * 3072, 89, GPU, False), (2 * 576 * 3072, 90, CPU, False),
    ],
)  # fmt: skip
def test_small_models_start_early_where_a_gpu_can(monkeypatch, largest, arch, device, expected):
    monkeypatch.setattr(early, "_wanted", not expected)
    monkeypatch.setattr(configs, "arch", lambda device: arch)
    early.decide(largest, device)
    assert early.wanted() is expected


def read_before_wait(ttir: str) -> set[str]:
    """The arguments that loads and stores up to the first wait get their addresses from."""
    body, found = ttir.split("griddepcontrol.wait")[0], set()
    signature = next(line for line in body.splitlines() if "tt.func" in line)
    comes_from = {name: {name} for name in re.findall(r"%(\w+_ptr): !tt.ptr", signature)}
    assert comes_from
    for line in body.splitlines():
        made, operands = re.match(r"\s*%(\w+)", line), re.findall(r"%(\w+)", line)
        sources = set().union(*(comes_from.get(name, set()) for name in operands))
        if re.search(r"tt\.(load|store|atomic\w*)\b", line):
            assert "tt.load" in line
            found |= comes_from[operands[1]]
        elif made:
            comes_from[made[1]] = sources
    return found


def test_nothing_that_may_be_written_is_touched_before_the_wait():
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, cwd=ROOT / "kernels", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seen = set()
    for name, ttir, ptx in json.loads(done.stdout):
        seen.add(name)
        assert read_before_wait(ttir) == MAY_READ[name], name
        lines = ptx.splitlines()
        waits = [at for at, line in enumerate(lines) if "griddepcontrol.wait" in line]
        releases = [at for at, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line]
        assert len(waits) == len(releases) == (2 if name == "_decode_flat" else 1), name
        assert all(wait < release for wait, release in zip(waits, releases, strict=True)), name
        assert not any(re.search(r"\b(st|atom|red)\.\S*global", line) for line in lines[: waits[0]]), name
    assert seen == set(MAY_READ)
