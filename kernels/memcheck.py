"""Small cases of the kernels under NVIDIA's compute-sanitizer, on a GPU: no access outside what a tensor owns, no race, no missing barrier.

    PYTHONPATH=kernels python kernels/memcheck.py [--tool memcheck|racecheck|synccheck|initcheck] [--parts small,few_rows]

Parts: attention, small, sampling, few_rows; all where none is named.

The numbers are checked against float64 in passing. Exits 2 where there is no compute-sanitizer or it cannot watch this GPU.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

Errors = Iterator[tuple[str, float]]

FEW_ROWS_PRODUCTS = ((2304, 1024), (960, 576), (336, 192))
"""(columns, depth), small enough for a tool that watches every access."""


def sanitizer() -> str | None:
    """The tool's path: on PATH, or where a CUDA toolkit puts it."""
    homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), *sorted(glob.glob("/usr/local/cuda-*"), reverse=True)]
    places = [f"{home}/{folder}/compute-sanitizer" for home in homes for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next((place for place in places if os.access(place, os.X_OK)), None)


def cases(parts: set[str]) -> list[tuple[Errors, float]]:
    """What is launched, and the error that each may have."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
    import gpu_check
    import gpu_check_attention
    import torch

    gpu_check.CHECK_SAMPLES = ((5000,), (torch.bfloat16, torch.float32))
    attention = [gpu_check.check_decode(), gpu_check.check_prefill(), gpu_check_attention.check_all()]
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if is_hopper:
        attention.append(gpu_check.check_hopper())
    found = [(case, 8e-3) for case in attention if "attention" in parts]
    found += [(gpu_check.check_small(), 6e-3), (gpu_check.check_one_row(), 8e-3)] if "small" in parts else []
    found += [(gpu_check.check_few_rows(FEW_ROWS_PRODUCTS), 8e-3)] if is_hopper and "few_rows" in parts else []
    return found + ([(gpu_check.check_sampling(), 0.04)] if "sampling" in parts else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "synccheck", "initcheck"), default="memcheck")
    parser.add_argument("--parts", default="attention,small,sampling,few_rows")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        found = cases(set(args.parts.split(",")))
        import gpu_check

        return bool(gpu_check.report(found))
    tool = sanitizer()
    if tool is None:
        print("memcheck: no compute-sanitizer on PATH, in CUDA_HOME or under /usr/local/cuda*", file=sys.stderr)
        return 2
    # Tensors of their own, not pieces of torch's pool: what lies past one of them is then nobody's.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    again = [sys.executable, __file__, "--inside", "--parts", args.parts]
    command = [tool, "--tool", args.tool, "--error-exitcode", "9", "--print-limit", "20", "--target-processes", "application-only", *again]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-3000:])
    return 2 if "Device not supported" in done.stdout + done.stderr else done.returncode


if __name__ == "__main__":
    sys.exit(main())
