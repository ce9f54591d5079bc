"""Programmatic dependent launch, for models so small that a step is bound by launching: a kernel starts while the one before it ends.

Why the order is right. A kernel that starts early waits for the launch before it, until that is complete and its writes are seen, before
it reads or writes what any launch may write, and lets the next one start only after that wait. So whoever has started knows all launches
before its predecessor complete, and after its own wait that one too. Launches that take no part (those of libraries, fills of memory)
start when all before them is complete, so that the same holds behind them. Before its wait a kernel may read what never changes, weights
and tables, and what was written before its predecessor: positions and slots, which are as old as the step, and the step's list of tiles.
The launch right behind the one that makes the list does not start early, or reads nothing before its wait (`decode_hopper`).
"""

import torch
import triton
import triton.language as tl

from pagecast_kernels import configs

SMALL_WEIGHT = 16 << 20
"""Bytes of a model's largest weight of a product up to which its launches start early. To read as much takes an H200 3.5 us, about what
a launch costs that waits for the end of the one before. Only both ends are measured: with 3.5 MB (135M parameters) a step of one row
takes 0.511 ms instead of 0.655, with 235 MB (8B) it takes 0.8 to 4.7 % longer, and of 64 rows up to 4.7 %."""

_wanted = False


def decide(largest_weight: int | None, device: torch.device) -> None:
    """Whether launches start early from here on, for the model that a process serves: before any of its graphs is captured.

    largest_weight: bytes of its largest product; None for a model of another kind, of which none was measured.
    """
    global _wanted
    small = largest_weight is not None and largest_weight <= SMALL_WEIGHT
    _wanted = small and device.type != "cpu" and configs.arch(device) >= 90


def wanted() -> bool:
    """What was decided; False where nobody did."""
    return _wanted


@triton.jit
def wait_and_release(EARLY: tl.constexpr):
    """Wait for the launch before, then let the next one start. Every program of a kernel that starts early comes here once."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(pointers):
    """Each pointer's line of 128 bytes into L2."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [pointers], tl.int32, is_pure=False, pack=1)
