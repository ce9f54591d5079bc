"""The one-row product in the interpreter, against float64."""

import pytest
import torch

from pagecast_kernels import reference
from pagecast_kernels.gemv import GemvConfig, gemv, gemv_add, norm_gemv, norm_gemv_silu_mul


@pytest.mark.parametrize(("columns", "depth"), [(96, 256), (37, 136), (8, 1024)])
def test_gemv_equals_float64(columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight = torch.randn(1, depth, generator=generator).half(), torch.randn(columns, depth, generator=generator).half()
    expected = x.double() @ weight.double().T
    for config in (GemvConfig(8, 128, 2, 4), GemvConfig(16, 64, 1, 4)):
        out = gemv(x, weight, out=torch.full((1, columns), float("nan"), dtype=torch.float16), config=config)
        assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 2e-3


@pytest.mark.parametrize(("columns", "depth"), [(96, 256), (37, 136)])
def test_what_surrounds_the_product_of_a_layer_is_done_in_passing(columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    x, gamma = (torch.randn(1, depth, generator=generator).half() for _ in range(2))
    weight = (torch.randn(columns, depth, generator=generator) / 8).half()
    gates = (torch.randn(2 * columns, depth, generator=generator) / 8).half()
    residual = torch.randn(1, columns, generator=generator).half()
    config = GemvConfig(8, 128, 2, 4)
    exact = [tensor.double() for tensor in (x, gamma[0], weight, gates, residual)]
    nan = lambda: torch.full((1, columns), float("nan"), dtype=torch.float16)
    pairs = (
        (norm_gemv(x, gamma[0], 1e-5, weight, None, nan(), config), reference.norm_linear(exact[0], exact[1], 1e-5, exact[2])),
        (
            norm_gemv(x, gamma[0], 1e-5, weight, weight[:, 0].contiguous(), nan(), config),
            reference.norm_linear(exact[0], exact[1], 1e-5, exact[2], exact[2][:, 0]),
        ),
        (norm_gemv_silu_mul(x, gamma[0], 1e-5, gates, nan(), config), reference.norm_linear_silu_mul(exact[0], exact[1], 1e-5, exact[3])),
        (gemv_add(x, weight, residual, config), reference.linear_add(exact[0], exact[2], exact[4])),
    )
    for got, want in pairs:
        assert torch.linalg.norm(got.double() - want) / torch.linalg.norm(want) < 2e-3
