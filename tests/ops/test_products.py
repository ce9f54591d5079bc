"""Which library a product goes to changes how long it takes, not what it is."""

import pytest
import torch

from pagecast_kernels import configs, products, reference


def test_products_of_any_number_of_rows() -> None:
    g = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(*shape, generator=g).bfloat16() for shape in ((24, 64), (24,)))
    for rows in (1, 2, 40):
        x = torch.randn(rows, 64, generator=g).bfloat16()
        want = reference.linear(x.double(), weight.double(), bias.double())
        got = products.linear(x, weight, bias).double()
        assert torch.linalg.norm(got - want) / torch.linalg.norm(want) < 8e-3


def test_sums_with_products_of_any_number_of_rows() -> None:
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(24, 64, generator=g).bfloat16()
    for rows in (1, 2, 40):
        x, residual = torch.randn(rows, 64, generator=g).bfloat16(), torch.randn(rows, 24, generator=g).bfloat16() * 8
        want = reference.linear_add(x.double(), weight.double(), residual.double())
        assert products.linear_add(x, weight, residual) is residual
        assert torch.linalg.norm(residual.double() - want) / torch.linalg.norm(want) < 8e-3


def test_a_library_is_set_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    monkeypatch.setattr(products, "_preferred", "")
    for rows in (16, 64, 96, 256, 512, 100):
        products.prefer(configs.blas_library(rows))
    assert chosen == ["cublas", "cublaslt", "cublas", "cublaslt"]
