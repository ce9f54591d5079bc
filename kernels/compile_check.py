"""Compiles every kernel for a GPU that need not be there, by its own launcher, and reports what the compiler made of it.

    PYTHONPATH=kernels python kernels/compile_check.py [--arch 90] [--only paged_decode]

For each variant: warps, registers, shared memory, stack (a stack in an attention kernel is a spill). Exits 1 if one fails, spills,
needs more shared memory than a program may have, or rounds float32 to TF32. Those of float32 may spill a little: that type is there to
compare with, not for speed. The launches are in the *_variants.py beside this file.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from attention_variants import (
    attention_variants,
    byte_cache_variants,
    hopper_byte_variants,
    hopper_variants,
    latent_hopper_variants,
    latent_variants,
    shared_variants,
)
from few_rows_variants import few_rows_variants
from one_row_variants import rotating_variants
from product_variants import expert_variants, quantized_expert_variants, quantized_variants, wide_expert_variants
from row_variants import all_reduce_variants, row_variants, shard_variants, step_variants, telling_variants
from triton.runtime import jit

from pagecast_kernels import absent_gpu, configs

FLOAT32_STACK = 256
"""Bytes of a thread that a kernel of float32 may spill."""
MEASURED_STACK = {"paged_decode x512 h128 e4m3": 16}
"""The same of a launch that was measured to be faster than those that spill nothing."""


def compile_only(arch: int) -> list[Any]:
    """From here on a launch compiles and starts nothing. Returns the list that gathers the compiled kernels."""
    absent_gpu.compile_for(arch, processors=132)
    compiled: list[Any] = []
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(launch(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    jit.JITFunction.run = run
    return compiled


def usage(kernel: Any) -> dict[str, int]:
    """registers, stack bytes and shared bytes of a compiled kernel, from cuobjdump as triton ships it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", default="", help="variants whose name holds this")
    args = parser.parse_args()
    compiled = compile_only(args.arch)
    bad = 0
    kinds = (hopper_variants, hopper_byte_variants, latent_hopper_variants, wide_expert_variants, rotating_variants, few_rows_variants)
    kinds += (telling_variants,)
    hopper = [variant for kind in kinds for variant in kind()] if args.arch == 90 else []
    every = [*attention_variants(), *hopper, *all_reduce_variants(), *shard_variants(), *quantized_variants(), *step_variants()]
    every += quantized_expert_variants()
    for variants in (shared_variants, byte_cache_variants, latent_variants, row_variants, expert_variants):
        every += [*variants(torch.bfloat16), *variants(torch.float32)]
    wanted = [(name, launch) for name, launch in every if args.only in name]
    if not wanted:
        parser.error(f"no variant's name holds {args.only!r}")
    for name, launch in wanted:
        compiled.clear()
        try:
            launch()
        except configs.UnsupportedError as error:
            print(f"{name}: refused, {error}")
            continue
        except Exception as error:
            bad += 1
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}")
            continue
        for kernel in compiled:
            used = usage(kernel)
            allowed = FLOAT32_STACK if "float32" in name else MEASURED_STACK.get(name, 0)
            spilled = used["stack"] > allowed and any(kind in name for kind in ("paged", "mixture", "heads", "few_rows"))
            rounds = ".tf32" in kernel.asm["ptx"]
            large = used["shared"] > configs.shared_memory_of(args.arch)
            bad += spilled or large or rounds
            figures = (f"{key} {value:<6}" for key, value in used.items())
            print(f"{name:48} {kernel.metadata.name:20}", *figures, "SPILLS" * spilled, "TOO LARGE" * large, "TF32" * rounds)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
