"""The one-row product in the interpreter, against float64."""

import pytest
import torch

from pagecast_kernels.gemv import GemvConfig, gemv


@pytest.mark.parametrize(("columns", "depth"), [(96, 256), (37, 136), (8, 1024)])
def test_gemv_equals_float64(columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight = torch.randn(1, depth, generator=generator).half(), torch.randn(columns, depth, generator=generator).half()
    expected = x.double() @ weight.double().T
    for config in (GemvConfig(8, 128, 2, 4), GemvConfig(16, 64, 1, 4)):
        out = gemv(x, weight, out=torch.full((1, columns), float("nan"), dtype=torch.float16), config=config)
        assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 2e-3
