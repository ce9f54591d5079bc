"""Launch tables of the grouped products of a mixture of experts; what else configs.py says of launches goes for these."""

from dataclasses import dataclass
from functools import partial

import torch

from pagecast_kernels import configs


@dataclass(frozen=True)
class Experts:
    """A grouped product. rows: pairs of a tile; columns: outputs of a program; depth: inputs a step. wide: by wide_experts, whose tiles
    have `extra` pairs more, and are computed as of `short` where they hold no more than that (0: neither)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    wide: bool = False
    extra: int = 0
    short: int = 0


_wide = partial(Experts, wide=True, extra=32)
WIDE_EXPERTS: tuple[tuple[float, Experts, Experts], ...] = (
    (48, _wide(64, 64, 64, 4, 4), _wide(64, 128, 64, 4, 4)),
    (96, _wide(128, 64, 64, 4, 3, short=64), _wide(128, 128, 64, 4, 3, short=64)),
)
"""Launches of both products of 16 bits on Hopper by wide_experts: for more than how many pairs an expert; the last that applies. Where
launches change is a factor of two apart or more: what is compiled ahead is that of powers of two. Fastest of 26 and 23 launches at 544
to 16,384 tokens of Qwen3-30B-A3B on an H200, 30 November 2026."""


def experts(pairs: int, count: int, itemsize: int, device: torch.device | str) -> tuple[Experts, Experts]:
    """Launches of the two grouped products for that many (token, expert) pairs over `count` experts, of values of `itemsize` bytes:
    few pairs an expert are a matter of reading weights by many programs, many are one of tensor cores and of the L2 cache."""
    if itemsize == 2 and configs.is_hopper(device):
        for least, *launches in reversed(WIDE_EXPERTS):
            if pairs > least * count:
                return launches[0], launches[1]
    each = pairs / count
    long, short = configs.depth_of(128, itemsize), configs.depth_of(64, itemsize)
    if pairs <= 64:
        return Experts(16, 32, long, 4, 4), Experts(16, 32, long, 4, 4)
    if each <= 8:
        return Experts(16, 64, long, 4, 3), Experts(16, 128, long, 4, 3)
    if each <= 24:
        return Experts(32, 64, long, 4, 3), Experts(32, 128, long, 4, 3)
    if itemsize > 2:
        return Experts(64, 64, short, 8, 4), Experts(64, 64, short, 8, 4)
    if each <= 64:
        return Experts(64, 64, short, 4, 4), Experts(64, 128, short, 4, 4)
    return Experts(128, 64, short, 8, 4), Experts(128, 128, short, 8, 4)


def packed_experts(pairs: int, count: int, row_tiles: int, device: torch.device | str) -> Experts:
    """Launch of a grouped product with packed weights of so many tiles of 64 rows: columns are rows of the weight, depth is that of a
    tile of words. Fastest with int4 at 1, 16, 64, 256 and 2,048 tokens of Qwen3-30B-A3B on an H200, 30 November 2026."""
    each, wide = pairs / count, 128 if row_tiles % 2 == 0 else 64
    columns = 64 if configs.shared_memory(device) < configs.MUCH else wide
    if pairs <= 64:
        return Experts(16, 64, 128, 4, 5)
    if each <= 8:
        return Experts(16, columns, 128, 4, 5)
    if each <= 48:
        return Experts(32, columns, 128, 4, 3)
    return Experts(64, wide, 128, 4, 4)


def scaled_experts(pairs: int, count: int) -> Experts:
    """The same with weights and activations of 8 bits, of e4m3 where measured."""
    each = pairs / count
    if each <= 8:
        return Experts(16, 64, 128, 4, 5 if pairs <= 64 else 3)
    if each <= 48:
        return Experts(32, 64, 128, 4, 3)
    return Experts(64, 64, 128, 4, 4)
