"""Stream-K products in the interpreter, against float64."""

import pytest
import torch

from pagecast_kernels.gemm import GemmConfig, GemmWorkspace, linear_with
from pagecast_kernels.gemv import GemvConfig, gemv_with


@pytest.mark.parametrize(("rows", "columns", "depth", "sms"), [(1, 96, 256, 5), (3, 200, 136, 4), (17, 128, 512, 7), (40, 64, 64, 3), (33, 320, 192, 1)])
def test_stream_k_equals_float64(rows: int, columns: int, depth: int, sms: int) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, depth, generator=generator).to(torch.float16)
    weight = torch.randn(columns, depth, generator=generator).to(torch.float16)
    workspace = GemmWorkspace(torch.device("cpu"), partial_bytes=1 << 22, max_tiles=64)
    out = torch.full((rows, columns), float("nan"), dtype=torch.float16)
    for config in (GemmConfig(64, 64, 2, 4, 1), GemmConfig(32, 32, 2, 4, 2, block_m=16)):
        linear_with(x, weight, config, workspace, sms, out=out.fill_(float("nan")))
        expected = x.double() @ weight.double().T
        assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 2e-3
        assert int(workspace.counters.abs().sum()) == 0  # ready for the next product


def test_workspace_too_small_is_named() -> None:
    x, weight = torch.randn(16, 64).half(), torch.randn(64, 64).half()
    with pytest.raises(ValueError, match="workspace too small"):
        linear_with(x, weight, GemmConfig(64, 64, 2, 4, 1), GemmWorkspace(torch.device("cpu"), 64, 64), 4)


@pytest.mark.parametrize(("columns", "depth"), [(96, 256), (37, 136), (8, 1024)])
def test_gemv_equals_float64(columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, weight = torch.randn(1, depth, generator=generator).half(), torch.randn(columns, depth, generator=generator).half()
    expected = x.double() @ weight.double().T
    for config in (GemvConfig(8, 128, 2, 4), GemvConfig(16, 64, 1, 4)):
        out = gemv_with(x, weight, config, out=torch.full((1, columns), float("nan"), dtype=torch.float16))
        assert torch.linalg.norm(out.double() - expected) / torch.linalg.norm(expected) < 2e-3
