"""One-row products with weights of 4 and 8 bits in the interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from pagecast_kernels import quantized_rows, reference
from pagecast_kernels import quantized_weights as weights
from pagecast_kernels import reference_quantized as twin
from pagecast_kernels.quantized_gemv import OneRowConfig, packed_gemv, scaled_gemv

EPS = 1e-5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def near(got: Tensor, want: Tensor, bound: float = 2e-3) -> bool:
    return bool(torch.linalg.norm(got.double() - want) / torch.linalg.norm(want) < bound)


def packed(rows: int, columns: int, group: int, zeros: bool, paired: bool = False, kind: weights.Kind = "int4") -> weights.PackedWeight:
    """Every place its own random value, scale and zero."""
    generator, top = torch.Generator().manual_seed(rows), 16 if kind == "int4" else 256
    values = torch.randint(0, top, (rows, columns), generator=generator).to(torch.uint8)
    groups = -(-columns // group) if group else 1
    scales = torch.rand(rows, groups, generator=generator) * 0.01 + 0.001
    zero = torch.randint(0, top + 1, (rows, groups), generator=generator) if zeros else None
    return weights.pack(kind, values, scales, zero, group, paired)


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "group", "zeros", "config"),
    [
        ("int4", 128, 512, 128, False, OneRowConfig(16, 4, 2, 4)), ("int4", 100, 640, 128, True, OneRowConfig(32, 2, 1, 4)),
        ("int4", 70, 200, 0, True, OneRowConfig(16, 8, 1, 4)), ("int4", 64, 384, 256, False, OneRowConfig(64, 2, 2, 4)),
        ("int8", 200, 512, 0, False, OneRowConfig(32, 8, 2, 4)), ("int8", 100, 640, 128, True, OneRowConfig(16, 4, 1, 4)),
        ("int8", 70, 200, 0, True, OneRowConfig(64, 2, 2, 8)), ("int8", 64, 328, 0, False, OneRowConfig(16, 16, 1, 4)),
    ],
)  # fmt: skip
def test_packed_gemv_equals_float64(
    kind: weights.Kind, rows: int, columns: int, group: int, zeros: bool, config: OneRowConfig
) -> None:
    weight = packed(rows, columns, group, zeros, kind=kind)
    exact = weights.dequantized(weight, torch.float64)
    x, gamma, bias, residual = random(1, columns), random(1, columns)[0], random(rows), random(1, rows)
    assert near(packed_gemv(x, weight, bias=bias, config=config), x.double() @ exact.T + bias.double())
    want = reference.norm_linear(x.double(), gamma.double(), EPS, exact)
    assert near(packed_gemv(x, weight, gamma=gamma, eps=EPS, config=config), want)
    out = torch.full((1, rows), float("nan"), dtype=x.dtype)
    assert packed_gemv(x, weight, out=out, config=config) is out
    assert near(out, x.double() @ exact.T)
    want = residual.double() + x.double() @ exact.T
    assert packed_gemv(x, weight, residual=residual, config=config) is residual
    assert near(residual, want)


@pytest.mark.parametrize(("kind", "rows", "zeros"), [("int4", 128, False), ("int4", 48, True), ("int8", 96, False)])
def test_gates_and_ups_of_packed_rows_meet(kind: weights.Kind, rows: int, zeros: bool) -> None:
    weight = packed(rows, 256, 128, zeros, paired=True, kind=kind)
    x, gamma = random(1, 256), random(1, 256)[0]
    want = reference.norm_linear_silu_mul(x.double(), gamma.double(), EPS, weights.dequantized(weight, torch.float64))
    for config in (OneRowConfig(16, 2, 2, 4), OneRowConfig(32, 1, 1, 4)):
        assert near(packed_gemv(x, weight, gamma=gamma, eps=EPS, config=config), want)


def test_only_known_kinds_of_packed_weights_are_taken() -> None:
    narrow = packed(64, 256, 64, False)
    with pytest.raises(ValueError, match="groups of 64"):
        packed_gemv(random(1, 256), narrow)


def in_slices(x: Tensor) -> Tensor:
    """x [1, K] rounded to e4m3 in slices of 128 columns, by the kernel for several rows: the interpreter's rounding is not torch's."""
    slices = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).view(-1, 128)
    values, scales = quantized_rows.quantize_rows(slices, torch.float8_e4m3fn)
    return (values.double() * scales.double()[:, None]).view(1, -1)[:, : x.shape[1]]


@pytest.mark.parametrize(("rows", "columns", "config"), [(96, 512, OneRowConfig(16, 4, 2, 4)), (37, 200, OneRowConfig(16, 16, 1, 4))])
def test_scaled_gemv_rounds_x_in_slices(rows: int, columns: int, config: OneRowConfig) -> None:
    values, scales = twin.quantize_rows(random(2 * rows, columns), torch.float8_e4m3fn)
    meant = values.double() * scales.double()[:, None]
    x, gamma, bias, residual = random(1, columns), random(1, columns)[0], random(rows), random(1, rows)
    x[0, 128:] *= 100.0
    # Where a product falls on the other side of half a step, one value of x is the neighbour in e4m3.
    plain, bound = in_slices(x), 1e-2
    normed = in_slices(x.float() * gamma.float()) / (x.double().square().mean() + EPS).sqrt()
    one = (x, values[:rows], scales[:rows])
    assert near(scaled_gemv(*one, bias=bias, config=config), plain @ meant[:rows].T + bias.double(), bound)
    assert near(scaled_gemv(*one, gamma=gamma, eps=EPS, config=config), normed @ meant[:rows].T, bound)
    gate, up = (normed @ meant.T).chunk(2, -1)
    got = scaled_gemv(x, values, scales, gamma=gamma, eps=EPS, gated=True, config=config)
    assert near(got, torch.nn.functional.silu(gate) * up, bound)
    kept = residual.clone()
    assert scaled_gemv(*one, residual=kept, config=config) is kept
    assert near(kept, residual.double() + plain @ meant[:rows].T, bound)
