"""Weights of a product that are not plain tensors, and the operators that take them.

`ops.linear` and its gated relatives accept a Tensor or one of these in the weight's place; layers do not tell them apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_kernels.quantized_weights import PackedExperts, PackedWeight, ScaledExperts, in_parts
from pagecast_kernels.routing import Routing

DENSE_FROM = 257
"""Rows from which on a packed weight is de-quantized for one product by the library: the launch table's last row is before it."""
WIDE_DENSE_FROM = 513
"""The same for an output head, whose own launches take 256 rows at a time (measured at 512 and 1,024 rows)."""
MOST_DENSE = 1 << 27
"""Values of a weight that are de-quantized at a time where it is not paired: an output head may have four times as many."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Values of 4 or 8 bits that meet activations of 16. order int64[K]: which column of x each column of the weight belongs to."""

    weight: PackedWeight
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.rows, self.weight.columns


@dataclass(frozen=True, slots=True)
class Scaled:
    """values float8_e4m3fn or int8 [N, K] that meet activations of their own type, and a scale float32[N] for each row."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True, slots=True)
class Rounded:
    """What a CPU keeps of a `Scaled`: its values times its scales, [N, K] in the model's type. x is rounded to `dtype` and back.

    Also of experts: [E, N, K]."""

    weight: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations float8_e4m3fn or int8 [T, K] with a scale float32[T] for each row, as a norm or SiLU·mul may leave them."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


Weight = Tensor | Packed | Scaled | Rounded
ExpertsWeight = Tensor | PackedExperts | ScaledExperts | Rounded
"""Of all experts. On a GPU `ops.mixture` takes those that it may meet as they are."""


def takes(weight: Weight) -> torch.dtype | None:
    """The 8-bit type in which a product wants its activations, if whoever makes them can leave them so."""
    return weight.values.dtype if isinstance(weight, Scaled) else None


def suits_one_row(weight: Weight) -> bool:
    """Whether the products of one row are to take a weight: rows in whole 16-byte words, of a kind that they know."""
    if isinstance(weight, Packed):
        from pagecast_kernels.quantized_gemv import knows_packed

        return weight.order is None and knows_packed(weight.weight)
    if isinstance(weight, Scaled):
        return weight.values.dtype == torch.float8_e4m3fn and weight.shape[1] % 16 == 0
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[1] % 8 == 0


def suits_heads(weight: Weight, size: int) -> bool:
    """Whether a product of one row that takes this weight can rotate heads of such a size: programs have equal parts of both halves."""
    return size == 128 if isinstance(weight, Packed) else size % (16 if isinstance(weight, Scaled) else 8) == 0


def nbytes(weight: Weight) -> int:
    """Bytes that a weight takes on its device."""
    if isinstance(weight, Packed):
        return weight.weight.nbytes + (0 if weight.order is None else weight.order.nbytes)
    if isinstance(weight, Scaled):
        return weight.values.nbytes + weight.scales.nbytes
    return weight.weight.nbytes if isinstance(weight, Rounded) else weight.nbytes


class CpuQuantized:
    """The products of cpu_ops for every kind of weight that a CPU keeps."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def _ready(self, x: Tensor, weight: Weight | ExpertsWeight) -> tuple[Tensor, Tensor]:
        from pagecast_kernels.reference_quantized import quantize_rows

        if isinstance(weight, Rounded):
            values, scales = quantize_rows(x, weight.dtype)
            return values.to(x.dtype) * scales.unsqueeze(1).to(x.dtype), weight.weight
        assert isinstance(weight, Tensor)
        return x, weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """See reference.linear."""
        x, plain = self._ready(x, weight)
        return self._plain.linear(x, plain, bias, out)  # type: ignore[no-any-return]

    def linear_silu_mul(self, x: Tensor, weight: Weight, eps: float | None = None) -> Tensor:
        """See reference.linear_silu_mul."""
        return self._plain.linear_silu_mul(*self._ready(x, weight), eps)  # type: ignore[no-any-return]

    def linear_gelu_mul(self, x: Tensor, weight: Weight) -> Tensor:
        """See reference.linear_gelu_mul."""
        return self._plain.linear_gelu_mul(*self._ready(x, weight))  # type: ignore[no-any-return]

    def mixture(self, x: Tensor, logits: Tensor, gate_up: ExpertsWeight, down: ExpertsWeight, routing: Routing, **options: Any) -> Tensor:
        """See reference.mixture."""

        def product(rows: Tensor, weight: ExpertsWeight, expert: int) -> Tensor:
            rows, plain = self._ready(rows, weight)
            return F.linear(rows, plain[expert])

        return self._plain.mixture(x, logits, gate_up, down, routing, product=product, **options)  # type: ignore[no-any-return]


class GpuQuantized:
    """The products of a GPU for every kind of weight that it keeps. plain: the same for tensors. Owns the workspace that splits share."""

    def __init__(self, plain: Any, device: torch.device) -> None:
        from pagecast_kernels import quantized_gemv, quantized_products, quantized_rows, scaled_products

        self._one_row = quantized_gemv
        self._plain, self._products, self._scaled, self._rows = plain, quantized_products, scaled_products, quantized_rows
        self._workspace = quantized_products.split_workspace(device)

    def linear(self, x: Tensor | Rows, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """See reference.linear. out: not for weights that meet activations of 8 bits."""
        assert out is None or not isinstance(weight, Scaled)
        if isinstance(weight, Packed):
            assert isinstance(x, Tensor)
            return self._packed(x, weight, bias, out=out)
        if isinstance(weight, Scaled):
            rows = x if isinstance(x, Rows) else Rows(*self._rows.quantize_rows(x, weight.values.dtype))
            return self._scaled.scaled_product(
                rows.values, rows.scales, weight.values, weight.scales, bias, dtype=self._plain.dtype, workspace=self._workspace
            )
        return self._plain.linear(x, weight, bias, out)  # type: ignore[no-any-return]

    def _packed(self, x: Tensor, weight: Packed, bias: Tensor | None, gated: bool = False, out: Tensor | None = None) -> Tensor:
        packed = weight.weight
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        if x.shape[0] == 1 and self._one_row.knows_packed(packed):
            return self._one_row.packed_gemv(x, packed, bias=bias, out=out)
        if x.shape[0] < (WIDE_DENSE_FROM if self._products.is_wide(packed) else DENSE_FROM):
            return self._products.packed_product(x, packed, bias, gated=gated, workspace=self._workspace, out=out)
        y = self._by_library(x, packed, bias, out)
        return self._plain.silu_mul(y) if gated else y  # type: ignore[no-any-return]

    def _by_library(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """The weight de-quantized, in parts of its rows where it is large."""
        first, parts = 0, list(in_parts(weight, MOST_DENSE))
        out = torch.empty((x.shape[0], weight.rows), dtype=x.dtype, device=x.device) if out is None else out
        scratch = torch.empty((parts[0].rows, weight.columns), dtype=x.dtype, device=x.device)
        for part in parts:
            dense, place = self._products.unpack_weight(part, scratch[: part.rows]).t(), slice(first, first + part.rows)
            if bias is None:
                torch.mm(x, dense, out=out[:, place])
            else:
                torch.addmm(bias[place], x, dense, out=out[:, place])
            first += part.rows
        return out

    def linear_silu_mul(self, x: Tensor | Rows, weight: Weight, eps: float | None = None) -> Tensor:
        """See reference.linear_silu_mul; norms are folded into plain weights alone."""
        if isinstance(weight, Packed) and weight.weight.paired:
            assert isinstance(x, Tensor)
            return self._packed(x, weight, None, gated=True)
        if isinstance(weight, Tensor):
            return self._plain.linear_silu_mul(x, weight, eps)  # type: ignore[no-any-return]
        return self._plain.silu_mul(self.linear(x, weight))  # type: ignore[no-any-return]

    def linear_gelu_mul(self, x: Tensor | Rows, weight: Weight) -> Tensor:
        """See reference.linear_gelu_mul."""
        if isinstance(weight, Tensor):
            return self._plain.linear_gelu_mul(x, weight)  # type: ignore[no-any-return]
        return self._plain.gelu_mul(self.linear(x, weight))  # type: ignore[no-any-return]

    def norm_linear(self, x: Tensor, gamma: Tensor, eps: float, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """See reference.norm_linear; of one row."""
        if isinstance(weight, Packed):
            return self._one_row.packed_gemv(x, weight.weight, gamma=gamma, eps=eps, bias=bias)
        if isinstance(weight, Scaled):
            return self._one_row.scaled_gemv(x, weight.values, weight.scales, gamma=gamma, eps=eps, bias=bias)
        return self._plain.norm_linear(x, gamma, eps, weight, bias)  # type: ignore[no-any-return]

    def norm_linear_heads(self, x: Tensor, gamma: Tensor, eps: float, weight: Weight, heads: Any, bias: Tensor | None) -> Tensor:
        """See gemv.norm_gemv_heads."""
        if isinstance(weight, Packed):
            return self._one_row.packed_gemv(x, weight.weight, gamma=gamma, eps=eps, bias=bias, heads=heads)
        if isinstance(weight, Scaled):
            return self._one_row.scaled_gemv(x, weight.values, weight.scales, gamma=gamma, eps=eps, bias=bias, heads=heads)
        return self._plain.norm_linear_heads(x, gamma, eps, weight, heads, bias)  # type: ignore[no-any-return]

    def norm_linear_silu_mul(self, x: Tensor, gamma: Tensor, eps: float, weight: Weight) -> Tensor:
        """See reference.norm_linear_silu_mul; of one row."""
        if isinstance(weight, Packed):
            return self._one_row.packed_gemv(x, weight.weight, gamma=gamma, eps=eps)
        if isinstance(weight, Scaled):
            return self._one_row.scaled_gemv(x, weight.values, weight.scales, gamma=gamma, eps=eps, gated=True)
        return self._plain.norm_linear_silu_mul(x, gamma, eps, weight)  # type: ignore[no-any-return]

    def linear_add(self, x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
        """See reference.linear_add; of one row."""
        if isinstance(weight, Packed):
            return self._one_row.packed_gemv(x, weight.weight, residual=residual)
        if isinstance(weight, Scaled):
            return self._one_row.scaled_gemv(x, weight.values, weight.scales, residual=residual)
        return self._plain.linear_add(x, weight, residual)  # type: ignore[no-any-return]

    def rms_norm_rows(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Rows:
        """See reference_quantized.rms_norm_quantized."""
        return Rows(*self._rows.rms_norm_quantized(x, weight, eps, dtype))

    def add_rms_norm_rows(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Rows:
        """See reference_quantized.add_rms_norm_quantized."""
        return Rows(*self._rows.add_rms_norm_quantized(x, residual, weight, eps, dtype))

    def linear_silu_mul_rows(self, x: Tensor | Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Rows:
        """linear_silu_mul with a bias, quantized for a product that follows."""
        return Rows(*self._rows.silu_mul_quantized(self.linear(x, weight, bias), dtype))
