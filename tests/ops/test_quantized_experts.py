"""Mixtures with quantized experts in the interpreter: the kernels and their twins against de-quantized weights in float64."""

import pytest
import torch
from ops.paged_case import relative_error

from pagecast_kernels import expert_configs, experts, quantized_rows, reference
from pagecast_kernels import quantized_weights as weights
from pagecast_kernels import reference_quantized as twin
from pagecast_kernels.quantized_weights import PackedExperts, ScaledExperts
from pagecast_kernels.routing import Routing

FP8 = torch.float8_e4m3fn
COUNT, HIDDEN, INNER = 6, 192, 96
ROUTING = Routing(2)


def packed(kind: weights.Kind, rows: int, columns: int, group: int, zeros: bool, paired: bool, ordered: bool, seed: int) -> PackedExperts:
    """Random values in every place, scales that differ from group to group, some experts' columns in another order."""
    generator, made, orders = torch.Generator().manual_seed(seed), [], []
    top = 16 if kind == "int4" else 256
    for expert in range(COUNT):
        values = torch.randint(0, top, (rows, columns), generator=generator).to(torch.uint8)
        if kind == "fp8":
            values = torch.randn(rows, columns, generator=generator).mul(50).clamp(-448, 448).to(FP8).view(torch.uint8)
        groups = -(-columns // group) if group else 1
        scales = torch.rand(rows, groups, generator=generator) * 0.01 + 0.001
        zero = torch.randint(0, top, (rows, groups), generator=generator) if zeros and expert != 1 else None
        made.append(weights.pack(kind, values, scales, zero, group, paired))
        orders.append(torch.randperm(columns, generator=generator) if ordered and expert % 2 else None)
    return weights.stacked(made, orders)


def dense(weight: PackedExperts | ScaledExperts) -> torch.Tensor:
    """float64 [E, N, K], columns in the order of x."""
    if isinstance(weight, ScaledExperts):
        return weight.values.double() * weight.scales.double().unsqueeze(-1)
    found = torch.stack([weights.dequantized(weight.expert(index), torch.float64) for index in range(COUNT)])
    if weight.order is None:
        return found
    return torch.stack([own[:, order.long().argsort()] for own, order in zip(found, weight.order, strict=True)])


def inputs(tokens: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, hidden, generator=generator).to(dtype), torch.randn(tokens, COUNT, generator=generator)


CASES = [
    ("int4", 64, False, True, False), ("int4", 32, True, True, False), ("int4", 64, True, False, True), ("int4", 0, False, True, False),
    ("int8", 96, True, False, False), ("int8", 32, False, True, True), ("fp8", 32, False, True, False), ("fp8", 0, False, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "group", "zeros", "paired", "ordered"), CASES)
def test_packed_experts_equal_float64(kind: weights.Kind, group: int, zeros: bool, paired: bool, ordered: bool) -> None:
    group = 0 if group == 96 else group
    gate_up = packed(kind, 2 * INNER, HIDDEN, group, zeros, paired, ordered, 1)
    down = packed(kind, HIDDEN, INNER, group and 32, zeros, False, ordered, 2)
    exact = [dense(gate_up), dense(down)]
    for tokens, config in ((1, None), (23, expert_configs.Experts(16, 64, 128, 4, 2))):
        x, logits = inputs(tokens)
        want = reference.mixture(x.double(), logits.double(), *exact, ROUTING)
        work = experts.experts_workspace(COUNT, "cpu")
        got = experts.mixture(x, logits, gate_up, down, ROUTING, workspace=work, config=config and (config, config))
        assert relative_error(got, want) < 3e-3
        assert not work.any()
        assert relative_error(reference.mixture(x.double(), logits.double(), gate_up, down, ROUTING), want) < 1e-9


def test_packed_experts_where_nothing_is_even() -> None:
    """Columns that end within a tile, rows that end within one, two tiles of rows a program, and GELU, which is not fused."""
    gate_up, down = packed("int4", 2 * 68, 200, 0, True, False, False, 3), packed("int4", 200, 68, 32, False, False, False, 4)
    x, logits = inputs(9, 200)
    want = reference.mixture(x.double(), logits.double(), dense(gate_up), dense(down), ROUTING, gelu=True)
    first, second = expert_configs.Experts(16, 64, 128, 4, 2), expert_configs.Experts(32, 128, 128, 4, 2)
    base = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).half() * 0.02
    got = experts.mixture(x, logits, gate_up, down, ROUTING, gelu=True, into=base.clone(), config=(first, second))
    assert relative_error(got.double() - base.double(), want) < 4e-3
    with pytest.raises(ValueError, match="columns must be 64 times a divisor of 3, got 128"):
        experts.mixture(x, logits, gate_up, down, ROUTING, gelu=True, config=(second, second))
    paired = packed("int4", 2 * 64, 200, 0, True, True, False, 3)
    with pytest.raises(ValueError, match=r"give SiLU·mul alone"):
        experts.mixture(x, logits, paired, down, ROUTING, gelu=True)


def scaled(rows: int, columns: int, dtype: torch.dtype, seed: int) -> ScaledExperts:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(COUNT * rows, 1, generator=generator) * 0.2
    values, scales = twin.quantize_rows(torch.randn(COUNT * rows, columns, generator=generator) * sizes, dtype)
    return ScaledExperts(values.view(COUNT, rows, columns), scales.view(COUNT, rows))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize(("tokens", "gelu", "rows"), [(1, False, 16), (21, True, 16), (21, False, 32)])
def test_scaled_experts_equal_float64(dtype: torch.dtype, tokens: int, gelu: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the activations are rounded to is taken from the kernel itself: here products are judged, not rounding."""
    gate_up, down = scaled(2 * 100, 136, dtype, 1), scaled(136, 100, dtype, 2)
    x, logits = inputs(tokens, 136)
    rounded, plain = [], quantized_rows.quantize_rows

    def seen(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rounded.append(plain(values, kind))
        return rounded[-1]

    monkeypatch.setattr(quantized_rows, "quantize_rows", seen)
    config = expert_configs.Experts(rows, 64, 64, 4, 2)
    got = experts.mixture(x, logits, gate_up, down, ROUTING, gelu=gelu, config=(config, config))
    meant = [value.double() * scale.double().unsqueeze(1) for value, scale in rounded]
    _, ids = reference.route(logits, None, ROUTING)
    flat = ids.flatten()
    first = (dense(gate_up)[flat] @ meant[0].repeat_interleave(2, 0).unsqueeze(-1)).squeeze(-1)
    gate, up = first.chunk(2, -1)
    activated = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    inner, kept = activated * up, meant[1]
    assert relative_error(kept, inner) < (0.1 if dtype == FP8 else 0.05)  # rounded to 8 bits on the way
    parts = (dense(down)[flat] @ kept.unsqueeze(-1)).squeeze(-1).view(tokens, 2, -1)
    scores, _ = reference.route(logits.double(), None, ROUTING)
    assert relative_error(got, (parts * scores.unsqueeze(-1)).sum(1)) < 2e-3
    exact = reference.mixture(x.double(), logits.double(), dense(gate_up), dense(down), ROUTING, gelu=gelu)
    twins = reference.mixture(x.float(), logits, gate_up, down, ROUTING, gelu=gelu)
    assert 1e-3 < relative_error(twins, exact) < (0.12 if dtype == FP8 else 0.05)


def test_each_product_may_be_of_another_kind() -> None:
    """A checkpoint may leave one of the two plain."""
    x, logits = inputs(5, HIDDEN)
    plain = torch.randn(COUNT, HIDDEN, INNER, generator=torch.Generator().manual_seed(8)).half()
    gate_up = packed("int8", 2 * INNER, HIDDEN, 64, False, True, False, 6)
    want = reference.mixture(x.double(), logits.double(), dense(gate_up), plain.double(), ROUTING)
    assert relative_error(experts.mixture(x, logits, gate_up, plain, ROUTING), want) < 3e-3
