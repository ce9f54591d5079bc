"""Quantized weights as checkpoints store them, read into one form: values in rows, scales and zero points by group."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pagecast_kernels.quantized_weights import DEFAULT_ZEROS, FP8_MAX, GROUPS, Kind, round_to_nearest, usable_group
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.parallel import Part

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns each half-byte of an AWQ word holds, from the lowest on."""
OPTIONAL = (".input_scale", ".input_scale_ub", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".g_idx", ".input_zero_point")
_SCALES = 8
_SPLIT = float((1 << 20) + 1)
"""value · this - (value · this - value) is value rounded to 4 digits, as e4m3 has them (Dekker 1971)."""
_ELEMENTS_AT_ONCE = (1 << 16, 1 << 24)
"""Whose errors are looked at together: what a CPU's cache holds, and what keeps a GPU busy."""
_ROWS_AT_ONCE = 1 << 14
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_output_scale", "k_proj.output_scale", "v_proj.output_scale")


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantized weight [N, K] = (value - zero) · scale, or a part of one. values uint8 as PackedWeight stores them; scales float32
    [N, G]; zeros float32 [N, G] or None for the kind's own; group: columns of a scale, 0: whole rows. order int64[K]: which column of
    x each column belongs to, where groups were made of other than neighbours. name: of the layer, for messages.
    """

    kind: Kind
    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None
    name: str

    def of_rows(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """With all that belongs to rows changed alike."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, values=change(self.values), scales=change(self.scales), zeros=zeros)

    def part(self, part: Part) -> "Stored":
        """One rank's. Raises LoadError where columns cannot be split there."""
        if part.dim == 0:
            return self.of_rows(part.of)
        if part.size == self.values.shape[1]:
            return self
        if self.order is not None:
            raise LoadError(f"tensor_parallel_size must be 1: the columns of {self.name} are ordered by activation, which cannot be split")
        values = part.of(self.values)
        if not self.group:
            return replace(self, values=values)
        group = math.gcd(self.group, part.start, part.size)  # a group that is cut becomes several of one scale
        if group != self.group and not usable_group(group, part.size):
            wanted = f"whole groups of {self.group} columns, or halves or quarters of at least {GROUPS[0]},"
            raise LoadError(f"tensor_parallel_size must leave {wanted} of {self.name}, got {part.size} columns")
        groups = Part(1, part.start // group, part.stop // group)
        cut = lambda scales: groups.of(scales.repeat_interleave(self.group // group, 1))
        return replace(
            self, values=values, group=group, scales=cut(self.scales), zeros=None if self.zeros is None else cut(self.zeros)
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K], columns in the order of x. Arithmetic in float32."""
        values = self.values.view(torch.float8_e4m3fn).float() if self.kind == "fp8" else self.values.float()
        spread = lambda x: x.repeat_interleave(self.group or values.shape[1], 1)[:, : values.shape[1]]
        zeros = DEFAULT_ZEROS[self.kind] if self.zeros is None else spread(self.zeros)
        value = ((values - zeros) * spread(self.scales)).to(dtype)
        return value if self.order is None else value[:, self.order.argsort()]


def joined(parts: list[Stored]) -> Stored | None:
    """The rows of several weights one after the other; None where they differ in more than their values."""
    first = parts[0]
    for other in parts[1:]:
        same = first.order is other.order
        if first.order is not None and other.order is not None:
            same = torch.equal(first.order, other.order)
        if other.kind != first.kind or other.group != first.group or not same:
            return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.full_like(p.scales, DEFAULT_ZEROS[p.kind]) if p.zeros is None else p.zeros for p in parts])
    return replace(first, values=torch.cat([p.values for p in parts]), scales=torch.cat([p.scales for p in parts]), zeros=zeros)


class Reads(Protocol):
    """What is asked of a checkpoint here."""

    def names(self) -> Any: ...
    def file_of(self, name: str) -> str: ...
    def raw(self, name: str) -> Tensor: ...


def is_quantized(scheme: Scheme, names: set[str], layer: str) -> bool:
    """Whether a layer's weight is stored quantized; layers that were left out have a plain one."""
    return layer + _marker(scheme) in names or (scheme.form == "fp8" and layer + ".weight_scale_inv" in names)


def _marker(scheme: Scheme) -> str:
    return {"awq": ".qweight", "gptq": ".qweight", "packed": ".weight_packed"}.get(scheme.form, ".weight_scale")


def tensors_of(scheme: Scheme, names: set[str], layer: str) -> set[str]:
    """Names of the tensors that a quantized layer has to have, and of those it may have and has."""
    needed = {
        "awq": (".qweight", ".qzeros", ".scales"), "gptq": (".qweight", ".qzeros", ".scales"),
        "packed": (".weight_packed", ".weight_scale"),
    }.get(scheme.form, (".weight", ".weight_scale"))  # fmt: skip
    if layer + ".weight_scale_inv" in names:
        needed = (".weight", ".weight_scale_inv")
    return {layer + ending for ending in needed} | {layer + ending for ending in OPTIONAL if layer + ending in names}


def wanted_names(scheme: Scheme | None, names: set[str], weights: list[str]) -> set[str]:
    """The tensors that a checkpoint must hold (and of those it may, those it does) in order to give these weights."""
    wanted: set[str] = set()
    for weight in weights:
        layer = weight.removesuffix(".weight")
        quantized = scheme is not None and is_quantized(scheme, names, layer)
        wanted |= tensors_of(scheme, names, layer) if scheme is not None and quantized else {weight}
    return wanted


def read(checkpoint: Reads, scheme: Scheme, names: set[str], layer: str, shape: tuple[int, ...], device: torch.device) -> Stored:
    """A layer's weight of the given shape [N, K], on the device. Raises LoadError naming file and tensor."""
    rows, columns = shape
    take = _Tensors(checkpoint, names, layer, device)
    if scheme.form == "awq":
        return _awq(take, scheme, rows, columns)
    if scheme.form == "gptq":
        return _gptq(take, scheme, rows, columns)
    if scheme.form == "packed":
        return _packed(take, scheme, rows, columns)
    return _bytes(take, scheme, rows, columns)


class _Tensors:
    """A layer's tensors by their endings."""

    def __init__(self, checkpoint: Reads, names: set[str], layer: str, device: torch.device) -> None:
        self._checkpoint, self._names, self.layer, self._device = checkpoint, names, layer, device

    def has(self, ending: str) -> bool:
        return self.layer + ending in self._names

    def tensor(self, ending: str, dtype: torch.dtype | None, *shape: int) -> Tensor:
        """Of this type (None: any float), and of this shape unless none is given."""
        name = self.layer + ending
        value = self._checkpoint.raw(name)
        good = value.dtype == dtype if dtype is not None else value.dtype.is_floating_point
        if not good or (shape and tuple(value.shape) != shape):
            wanted = f"{list(shape) if shape else 'any shape'} of {str(dtype or 'a float type').removeprefix('torch.')}"
            found = f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
            raise LoadError(f"{self._checkpoint.file_of(name)}: tensor {name} is {found}, must be {wanted}")
        return value.to(self._device)

    def refuse(self, ending: str, what: str) -> LoadError:
        name = self.layer + ending
        return LoadError(f"{self._checkpoint.file_of(name)}: tensor {name} {what}")


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32[...] -> uint8[..., 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).to(torch.uint8)


def _groups(group: int, columns: int) -> int:
    return -(-columns // group) if group else 1


def _kind(scheme: Scheme) -> Kind:
    return "int4" if scheme.bits == 4 else "int8"


def _awq(take: _Tensors, scheme: Scheme, rows: int, columns: int) -> Stored:
    """qweight int32[K, N / 8], qzeros int32[G, N / 8], scales [G, N] (AutoAWQ's GEMM layout)."""
    groups = _groups(scheme.group, columns)
    place = torch.tensor(AWQ_COLUMNS).argsort().tolist()
    unpack = lambda words: _fields(words, 4)[..., place].flatten(1)
    values = unpack(take.tensor(".qweight", torch.int32, columns, rows // 8)).t()
    zeros = unpack(take.tensor(".qzeros", torch.int32, groups, rows // 8)).t().float()
    return Stored("int4", values, take.tensor(".scales", None, groups, rows).t().float(), zeros, scheme.group, None, take.layer)


def _gptq(take: _Tensors, scheme: Scheme, rows: int, columns: int) -> Stored:
    """qweight int32[K · bits / 32, N], qzeros int32[G, N · bits / 32], scales [G, N], g_idx int32[K] (AutoGPTQ)."""
    bits, groups = scheme.bits, _groups(scheme.group, columns)
    words = take.tensor(".qweight", torch.int32, columns * bits // 32, rows)
    values = _fields(words.t(), bits).flatten(1)
    zeros = _fields(take.tensor(".qzeros", torch.int32, groups, rows * bits // 32), bits).flatten(1).t().float()
    zeros = zeros + 1.0 if scheme.plus_one else zeros
    scales = take.tensor(".scales", None, groups, rows).t().float()
    stored = Stored(_kind(scheme), values, scales, zeros, scheme.group, None, take.layer)
    return _ordered(take, stored, ".g_idx")


def _ordered(take: _Tensors, stored: Stored, ending: str) -> Stored:
    """Columns sorted by group, where the groups are not made of neighbours. Raises LoadError where groups differ in size."""
    if not take.has(ending) or not stored.group:
        return stored
    columns, group = stored.values.shape[1], stored.group
    index = take.tensor(ending, torch.int32, columns).long()
    neighbours = torch.arange(columns, device=index.device) // group
    if torch.equal(index, neighbours) or bool((index < 0).any()):  # -1: never filled, as without act-order
        return stored
    order = index.argsort(stable=True)
    if not torch.equal(index[order], neighbours):
        raise take.refuse(ending, f"must give every group {group} columns")
    return replace(stored, values=stored.values[:, order], order=order)


def _packed(take: _Tensors, scheme: Scheme, rows: int, columns: int) -> Stored:
    """weight_packed int32[N, K · bits / 32], weight_scale [N, G], weight_zero_point int32[N · bits / 32, G] (compressed-tensors)."""
    bits, groups = scheme.bits, _groups(scheme.group, columns)
    values = _fields(take.tensor(".weight_packed", torch.int32, rows, -(-columns * bits // 32)), bits).flatten(1)[:, :columns]
    scales = take.tensor(".weight_scale", None).float()
    scales = scales.view(1, 1).expand(rows, 1) if scales.numel() == 1 else scales.reshape(rows, groups)
    zeros = None
    if take.has(".weight_zero_point"):
        zeros = _fields(take.tensor(".weight_zero_point", torch.int32, -(-rows * bits // 32), groups).t(), bits)
        zeros = zeros.flatten(1)[:, :rows].t().float()
    return _ordered(take, Stored(_kind(scheme), values, scales, zeros, scheme.group, None, take.layer), ".weight_g_idx")


def _bytes(take: _Tensors, scheme: Scheme, rows: int, columns: int) -> Stored:
    """weight float8_e4m3fn or int8 [N, K], beside one scale, [N] or [N, 1] of them, or one for every block."""
    fp8 = scheme.form == "fp8"
    weight = take.tensor(".weight", torch.float8_e4m3fn if fp8 else torch.int8, rows, columns)
    values = weight.view(torch.uint8) if fp8 else (weight.to(torch.int16) + 128).to(torch.uint8)
    ending = ".weight_scale_inv" if take.has(".weight_scale_inv") else ".weight_scale"
    scales = take.tensor(ending, None).float()
    height, width = scheme.block
    if height:
        blocks = (-(-rows // height), -(-columns // width))
        if tuple(scales.shape) != blocks:
            raise take.refuse(ending, f"has shape {list(scales.shape)}, must be {list(blocks)}")
        return Stored("fp8", values, scales.repeat_interleave(height, 0)[:rows], None, width, None, take.layer)
    if scales.numel() not in (1, rows):
        raise take.refuse(ending, f"has {scales.numel()} values, must have 1 or {rows}")
    return Stored("fp8" if fp8 else "int8", values, scales.reshape(-1, 1).expand(rows, 1), None, 0, None, take.layer)


def rounded(weight: Tensor, method: str, group: int, name: str) -> Stored:
    """A plain weight [N, K] quantized here: "int4" by groups, "int8" or "fp8" by rows. Rounds to the nearest."""
    if method == "int8":  # some rows at a time: an output head in float32 is gigabytes
        found = [round_to_nearest(part, 0, True, 8) for part in weight.split(_ROWS_AT_ONCE)]
        values, scales = (torch.cat([part[place] for part in found]) for place in (0, 1))
        return Stored("int8", values, scales, None, 0, None, name)
    if method == "int4":
        values, scales, zeros = round_to_nearest(weight, group, True, 4)
        return Stored("int4", values, scales, zeros, group, None, name)
    wide = weight.float()
    scales = fp8_scales(wide)
    return Stored("fp8", fp8_values(wide, scales).view(torch.uint8), scales, None, 0, None, name)


def fp8_values(weight: Tensor, scales: Tensor) -> Tensor:
    """float8_e4m3fn of weight float32, to the nearest; scales float32 that broadcast to it."""
    return (weight / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_scales(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """float32[N, 1] for weight float32[N, K]: of the scales that bring a row's largest magnitude to between 224 and 448, eight to the
    octave, the one with the smallest squared error, weighed by importance float32[K].

    A float's error hardly depends on the size of its scale, but on where in a row its steps fall: the best of eight has an eighth less
    error than the one of the largest magnitude.
    """
    rows, columns = weight.shape
    sizes = torch.tensor([2 ** (step / _SCALES) for step in range(_SCALES)], device=weight.device)
    scales = torch.empty((rows, 1), device=weight.device)
    at_once = max(_ELEMENTS_AT_ONCE[weight.device.type == "cuda"] // (_SCALES * columns), 1)
    for first in range(0, rows, at_once):
        part = weight[first : first + at_once]
        tried = (part.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=1e-10) * sizes
        value = part.unsqueeze(1) / tried.unsqueeze(2)
        wide = value * _SPLIT
        error = wide.sub(value).neg_().add_(wide).sub_(value).square_()
        cost = (error.sum(2) if importance is None else error @ importance) * tried.square()
        scales[first : first + at_once] = tried.gather(1, cost.argmin(1, keepdim=True))
    return scales
