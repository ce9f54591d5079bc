"""How quantized weights are stored: words in the order in which a tensor-core tile takes them, and the way there and back.

A weight matrix [N, K] is cut into tiles of 64 rows and TILE_WORDS / 64 = 16 words a row. A word holds 8 values of 4 bits or 4 of 8
bits, value j being that of column j · 16 + c of the tile for word c, so that shifting and masking all words at once gives 16
columns of 64 rows. The 1,024 words of a tile lie as the threads of a warp group hold an operand of a 64 x 16 product: each thread
reads 16 bytes at a time and nothing moves between threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8"]
TILE_ROWS, TILE_WORDS = 64, 1024
FP8_MAX = 448.0
DEFAULT_ZEROS = {"int4": 8, "int8": 128, "fp8": 0}
"""The zero point, which is subtracted from a stored value, where a weight has none of its own."""
GROUPS = (32, 64, 128)
"""Columns that may share a scale, beside multiples of 128 and whole rows."""


def tile_columns(kind: Kind) -> int:
    """Columns of a tile."""
    return 128 if kind == "int4" else 64


@dataclass(frozen=True, slots=True)
class _Packed:
    """What a weight and those of experts have in common."""

    kind: Kind
    rows: int
    columns: int
    group: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    paired: bool = False


@dataclass(frozen=True, slots=True)
class PackedWeight(_Packed):
    """A weight [rows, columns] = (value - zero) · scale; rows of padding and columns of padding hold nothing that is ever added.

    paired: rows are gate rows and then as many up rows, and lie in tiles as eight of each in turn, so that one thread holds both
    of a pair. words int32[N / 64, K / tile, 1024]; scales float32[G, N], G groups of `group` columns, or G = 1 and group 0 for whole rows;
    zeros float32[G, N] of the stored values, or None where every zero is DEFAULT_ZEROS[kind].
    """

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


@dataclass(frozen=True, slots=True)
class PackedExperts(_Packed):
    """The same of E experts, each a PackedWeight of this shape: words [E, ..], scales and zeros [E, G, N].

    order int32[E, K]: which column of x each column of an expert's weight belongs to; None: its own.
    """

    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.words.shape[0], self.rows, self.columns

    def expert(self, index: int) -> PackedWeight:
        """One expert's weight."""
        zeros = None if self.zeros is None else self.zeros[index]
        return PackedWeight(self.kind, self.rows, self.columns, self.group, self.words[index], self.scales[index], zeros, self.paired)


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """Weights of E experts that meet activations of their own type: values float8_e4m3fn or int8 [E, N, K], scales float32[E, N]."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def usable_group(group: int, columns: int) -> bool:
    """Whether columns may share scales this way."""
    return group in (0, *GROUPS) or group == columns or (group % 128 == 0 and group > 0)


def paired_order(rows: int) -> Tensor:
    """int64[rows]: the row, among gate rows followed by up rows, that lies at each place of the tiles of a paired weight."""
    return torch.arange(rows).view(2, rows // 16, 8).transpose(0, 1).flatten()


def pack(kind: Kind, values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, paired: bool = False) -> PackedWeight:
    """values uint8[N, K] as stored (int4: 0..15, int8: value + 128, fp8: e4m3 bits); scales, zeros [N, G] in any float or int type.

    Raises ValueError for a group that the kernels do not know, and for paired rows whose halves are not multiples of 8.
    """
    rows, columns = values.shape
    if paired:
        if rows % 16:
            raise ValueError(f"paired rows must be a multiple of 16, got {rows}")
        order = paired_order(rows).to(values.device)
        values, scales = values[order], scales[order]
        zeros = None if zeros is None else zeros[order]
    if not usable_group(group, columns):
        raise ValueError(f"group must be 32, 64, a multiple of 128 or the whole row, got {group} of {columns} columns")
    if group in (0, columns):
        group = 0
    elif group > 128:  # the kernels step over 128 columns at most
        scales = scales.repeat_interleave(group // 128, 1)[:, : -(-columns // 128)]
        zeros = None if zeros is None else zeros.repeat_interleave(group // 128, 1)[:, : -(-columns // 128)]
        group = 128
    padded_rows, width = -(-rows // TILE_ROWS) * TILE_ROWS, tile_columns(kind)
    padded_columns = -(-columns // 128) * 128
    groups = padded_columns // group if group else 1
    words = _words(_padded(values, padded_rows, padded_columns), width)
    return PackedWeight(
        kind, rows, columns, group, words, _padded(scales.float(), padded_rows, groups).t().contiguous(),
        None if zeros is None else _padded(zeros.float(), padded_rows, groups).t().contiguous(), paired,
    )  # fmt: skip


def stacked(weights: list[PackedWeight], orders: list[Tensor | None]) -> PackedExperts:
    """Experts of one kind, shape and group. orders int64[K], as PackedExperts' for each."""
    first, zeros, order = weights[0], None, None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.stack([torch.full_like(w.scales, DEFAULT_ZEROS[w.kind]) if w.zeros is None else w.zeros for w in weights])
    if any(own is not None for own in orders):
        plain = torch.arange(first.columns, device=first.words.device)
        order = torch.stack([plain if own is None else own for own in orders]).int()
    words, scales = (torch.stack([getattr(weight, name) for weight in weights]) for name in ("words", "scales"))
    return PackedExperts(first.kind, first.rows, first.columns, first.group, words, scales, zeros, first.paired, order)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _words(values: Tensor, width: int) -> Tensor:
    rows, columns = values.shape
    per_word = width // 16
    bits = 32 // per_word
    lanes = values.view(rows // TILE_ROWS, TILE_ROWS, columns // width, per_word, 16)
    words = torch.zeros(lanes.shape[:3] + (16,), dtype=torch.int32, device=values.device)
    for j in range(per_word):
        words |= lanes[:, :, :, j].to(torch.int32) << (bits * j)
    # rows as (warp, half, lane / 4), words as (half, lane % 4, pair)
    words = words.view(rows // TILE_ROWS, 4, 2, 8, columns // width, 2, 4, 2)
    return words.permute(0, 4, 2, 1, 3, 6, 5, 7).reshape(rows // TILE_ROWS, columns // width, TILE_WORDS).contiguous()


def unpack(weight: PackedWeight) -> Tensor:
    """The stored values uint8[N, K] again, in the order of the tiles, padding left out."""
    width = tile_columns(weight.kind)
    row_tiles, column_tiles, _ = weight.words.shape
    words = weight.words.view(row_tiles, column_tiles, 2, 4, 8, 4, 2, 2).permute(0, 3, 2, 4, 1, 6, 5, 7)
    words = words.reshape(row_tiles * TILE_ROWS, column_tiles, 1, 16)
    bits = 512 // width
    shifts = torch.arange(width // 16, device=words.device, dtype=torch.int32).view(1, 1, -1, 1) * bits
    values = (words >> shifts) & ((1 << bits) - 1)
    return values.reshape(row_tiles * TILE_ROWS, -1)[: weight.rows, : weight.columns].to(torch.uint8)


def in_parts(weight: PackedWeight, most: int) -> Iterator[PackedWeight]:
    """The weight's rows in as few parts of whole tiles, about equal, as have at most this many values (or one tile); paired ones are one
    part."""
    row_tiles = weight.words.shape[0]
    parts = 1 if weight.paired else min(-(-weight.rows * weight.columns // most), row_tiles)
    tiles = -(-row_tiles // parts)
    for first in range(0, row_tiles, tiles):
        rows = slice(first * TILE_ROWS, (first + tiles) * TILE_ROWS)
        yield replace(
            weight, rows=min(rows.stop, weight.rows) - rows.start, words=weight.words[first : first + tiles], scales=weight.scales[:, rows],
            zeros=None if weight.zeros is None else weight.zeros[:, rows],
        )  # fmt: skip


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in dtype; arithmetic in float32, or in float64 for float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    stored = unpack(weight)
    values = stored.view(torch.float8_e4m3fn).to(wide) if weight.kind == "fp8" else stored.to(wide)
    spread = lambda x: x.to(wide).t().repeat_interleave(weight.group or values.shape[1], 1)[: weight.rows, : weight.columns]
    zeros = DEFAULT_ZEROS[weight.kind] if weight.zeros is None else spread(weight.zeros)
    value = ((values - zeros) * spread(weight.scales)).to(dtype)
    return value[paired_order(weight.rows).argsort().to(value.device)] if weight.paired else value


def grouped(weight: Tensor, group: int) -> Tensor:
    """weight [N, K] as float32 [N, G, group], the last group filled up with zeros."""
    size = group or weight.shape[1]
    return _padded(weight.float(), weight.shape[0], -(-weight.shape[1] // size) * size).view(weight.shape[0], -1, size)


def round_to_nearest(weight: Tensor, group: int, symmetric: bool, bits: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stored values uint8[N, K], scales float32[N, G], and zeros float32[N, G] unless symmetric."""
    top = (1 << bits) - 1
    parts = grouped(weight, group)
    if symmetric:
        scales = (parts.abs().amax(-1) * (2.0 / top)).clamp_(min=1e-10)
        zeros = torch.full_like(scales, (top + 1) / 2)
    else:
        low, high = parts.amin(-1).clamp_(max=0.0), parts.amax(-1).clamp_(min=0.0)
        scales = ((high - low) / top).clamp_(min=1e-10)
        zeros = torch.round(-low / scales).clamp_(0, top)
    values = torch.round(parts / scales.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).clamp_(0, top).to(torch.uint8)
    return values.flatten(1)[:, : weight.shape[1]].contiguous(), scales, None if symmetric else zeros
