"""Products with packed weights in the interpreter, against de-quantized weights times x in float64."""

import pytest
import torch

from pagecast_kernels import quantized_products as products
from pagecast_kernels import quantized_rows, scaled_products
from pagecast_kernels import quantized_weights as weights
from pagecast_kernels import reference_quantized as twin


def made(kind: weights.Kind, rows: int, columns: int, group: int, zeros: bool, seed: int, paired: bool = False) -> weights.PackedWeight:
    """Random values in every place, also extreme ones, and scales that differ from group to group."""
    generator = torch.Generator().manual_seed(seed)
    top = 16 if kind == "int4" else 256
    values = torch.randint(0, top, (rows, columns), generator=generator).to(torch.uint8)
    if kind == "fp8":
        values = torch.randn(rows, columns, generator=generator).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = -(-columns // group) if group else 1
    scales = torch.rand(rows, groups, generator=generator) * 0.01 + 0.001
    zero = torch.randint(0, top + 1, (rows, groups), generator=generator) if zeros else None
    return weights.pack(kind, values, scales, zero, group, paired)


SHAPES = [
    ("int4", 128, 512, 128, False), ("int4", 100, 640, 64, True), ("int4", 64, 576, 32, True), ("int4", 70, 200, 0, False),
    ("int4", 64, 512, 256, True), ("int4", 64, 192, 192, True),
    ("int8", 96, 256, 128, True), ("int8", 64, 200, 0, False), ("int8", 130, 320, 32, True), ("int8", 64, 128, 64, False),
    ("fp8", 96, 384, 128, False), ("fp8", 64, 96, 32, False), ("fp8", 64, 100, 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rows", "columns", "group", "zeros"), SHAPES)
def test_packed_product_equals_float64(kind: weights.Kind, rows: int, columns: int, group: int, zeros: bool) -> None:
    weight = made(kind, rows, columns, group, zeros, rows + columns)
    exact = weights.dequantized(weight, torch.float64)
    generator = torch.Generator().manual_seed(1)
    for count, splits, tiles in ((1, 1, 1), (19, 3, 1), (5, 2, 2 if 64 < rows <= 128 else 1)):
        x = torch.randn(count, columns, generator=generator).half()
        bias = torch.randn(rows, generator=generator).half() if count == 19 else None
        config = products.ProductConfig(16, tiles, splits, 2)
        out = torch.full((count, rows), float("nan"), dtype=torch.float16)
        products.packed_product(x, weight, bias, out=out, config=config)
        want = x.double() @ exact.T + (0 if bias is None else bias.double())
        assert torch.linalg.norm(out.double() - want) / torch.linalg.norm(want) < 2e-3
    restored = products.unpack_weight(weight, torch.full((rows, columns), float("nan")))
    assert torch.equal(restored, weights.dequantized(weight, torch.float32))


def test_launches_of_an_output_head_equal_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own table, of even and odd numbers of tiles; and the weight in parts, which together are the whole."""
    monkeypatch.setattr(products, "WIDE_TILES", 4)
    for rows in (4 * 64, 5 * 64 - 9):
        weight = made("int8", rows, 96, 0, False, rows)
        assert products.is_wide(weight) and not products.is_wide(made("int8", 64, 96, 0, False, 1))
        exact = weights.dequantized(weight, torch.float64)
        for count in (3, 200):
            x = torch.randn(count, 96, generator=torch.Generator().manual_seed(count)).half()
            got = products.packed_product(x, weight).double()
            want = x.double() @ exact.T
            assert torch.linalg.norm(got - want) / torch.linalg.norm(want) < 2e-3
        parts = list(weights.in_parts(weight, 130 * 96))
        assert len(parts) == (2 if rows == 256 else 3) and max(part.rows for part in parts) <= 130
        restored = [products.unpack_weight(part, torch.full((part.rows, 96), float("nan"))) for part in parts]
        assert torch.equal(torch.cat(restored), weights.dequantized(weight, torch.float32))
    paired = made("int4", 192, 256, 128, True, 5, paired=True)
    assert [part.rows for part in weights.in_parts(paired, 64)] == [192]


@pytest.mark.parametrize(("rows", "splits"), [(128, 1), (96, 2), (48, 1)])
def test_gated_product_equals_float64(rows: int, splits: int) -> None:
    weight = made("int4", rows, 256, 128, True, rows, paired=True)
    exact = weights.dequantized(weight, torch.float64)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).half()
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(3)).half()
    gate, up = (x.double() @ exact.T + bias[weights.paired_order(rows).argsort()].double()).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    out = torch.full((3, rows // 2), float("nan"), dtype=torch.float16)
    products.packed_product(x, weight, bias, gated=True, out=out, config=products.ProductConfig(16, 1, splits, 2))
    assert torch.linalg.norm(out.double() - want) / torch.linalg.norm(want) < 2e-3
    twins = twin.packed_product(x.double(), weight, bias.double(), gated=True)
    assert torch.allclose(twins, want)
    restored = products.unpack_weight(weight, torch.full((rows, 256), float("nan")))
    assert torch.equal(restored, weights.dequantized(weight, torch.float32))
    with pytest.raises(ValueError, match="gated must be True"):
        products.packed_product(x, weight, bias)


def test_pack_keeps_every_value() -> None:
    for kind, rows, columns in (("int4", 70, 200), ("int8", 64, 64), ("fp8", 130, 129)):
        top = 16 if kind == "int4" else 256
        values = torch.randint(0, top, (rows, columns), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
        packed = weights.pack(kind, values, torch.ones(rows, 1), None, 0)
        assert torch.equal(weights.unpack(packed), values)
    with pytest.raises(ValueError, match="got 48 of 200"):
        weights.pack("int4", torch.zeros(64, 200, dtype=torch.uint8), torch.ones(64, 5), None, 48)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "columns", "depth", "splits"), [(1, 64, 256, 1), (17, 100, 200, 2), (3, 130, 384, 3)])
def test_scaled_product_equals_float64(dtype: torch.dtype, rows: int, columns: int, depth: int, splits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, x_scale = twin.quantize_rows(torch.randn(rows, depth, generator=generator), dtype)
    sizes = torch.rand(columns, 1, generator=generator)
    weight, scale = twin.quantize_rows(torch.randn(columns, depth, generator=generator) * sizes, dtype)
    bias = torch.randn(columns, generator=generator) if rows == 17 else None
    want = (x.double() @ weight.double().T) * x_scale.double()[:, None] * scale.double() + (0 if bias is None else bias.double())
    out = torch.full((rows, columns), float("nan"))
    scaled_products.scaled_product(
        x, x_scale, weight, scale, bias, dtype=torch.float32, out=out, config=products.ProductConfig(16, 1, splits, 2)
    )
    assert torch.linalg.norm(out.double() - want) / torch.linalg.norm(want) < 1e-5
    assert torch.allclose(twin.scaled_product(x, x_scale, weight, scale, bias, dtype=torch.float32).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rows_are_quantized_as_by_the_twins(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(5, 96, generator=generator).half() for _ in range(2))
    x[2] = 0
    weight = torch.rand(96, generator=generator).half()
    kept = residual.clone()
    for got, want in (
        (quantized_rows.quantize_rows(x, dtype), twin.quantize_rows(x, dtype)),
        (quantized_rows.rms_norm_quantized(x, weight, 1e-5, dtype), twin.rms_norm_quantized(x, weight, 1e-5, dtype)),
        (
            quantized_rows.add_rms_norm_quantized(x, residual, weight, 1e-5, dtype),
            twin.add_rms_norm_quantized(x, kept, weight, 1e-5, dtype),
        ),
        (quantized_rows.silu_mul_quantized(x, dtype), twin.silu_mul_quantized(x, dtype)),
    ):
        assert torch.allclose(got[1], want[1], rtol=1e-3)
        restored = [value.float() * scale.unsqueeze(1) for value, scale in (got, want)]
        # Neighbours of e4m3 differ by an eighth or less, of int8 by the scale.
        allowed = restored[1].abs() * 0.13 + want[1].unsqueeze(1) * (0.01 if dtype == torch.float8_e4m3fn else 1.01)
        near = ((restored[0] - restored[1]).abs() <= allowed).float().mean()
        # The interpreter forgets the carry where rounding reaches the next power of two.
        assert float(near) >= (0.95 if dtype == torch.float8_e4m3fn else 1.0)
    assert torch.equal(residual, kept)
