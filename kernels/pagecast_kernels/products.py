"""The product of a layer by whatever is fastest for its number of rows: ours for one, else ours or a library's by what we measured, or a
library's by what it guesses."""

import torch
from torch import Tensor

from pagecast_kernels import configs, elementwise, product_table, reference
from pagecast_kernels.gemv import gemv, gemv_add

_preferred = ""
_table: product_table.ProductTable | None = None


def prepare(device: torch.device) -> bool:
    """Take what was measured for this device, if anything, and the scratch memory they share. Once, before any graph. Whether there is."""
    global _table
    _table = product_table.load(device)
    return _table is not None


def prepare_ours(device_name: str) -> None:
    """Take of what was measured for a GPU of this name the launches of our own: where kernels are compiled that are to run there."""
    global _table
    _table = product_table.few_rows_only(device_name)


def launch_ours() -> None:
    """After prepare_ours, and a step or more: whatever products of ours these weights may have."""
    if _table is not None:
        _table.launch_ours()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """See reference.linear. Called from one thread: torch's choice of library is one for the process."""
    # Of one row a product is nothing but reading the weight, which costs cuBLAS a tenth more (H200, 8B parameters).
    if x.shape[0] == 1 and x.dtype != torch.float32 and x.shape[1] % 8 == 0:
        return gemv(x, weight, bias, out)
    if _table is not None and bias is None and (y := _table.linear(x, weight, out)) is not None:
        return y
    _choose(x, weight)
    return reference.linear(x, weight, bias, out)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """See reference.linear_add; residual is contiguous. The sum is the last step of the product, no launch of its own."""
    if x.shape[0] == 1:
        return gemv_add(x, weight, residual)
    if _table is not None and (y := _table.linear_add(x, weight, residual)) is not None:
        return y
    _choose(x, weight)
    return residual.addmm_(x, weight.t())


def linear_silu_mul(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """See reference.linear_silu_mul. In one launch where that was measured to be faster."""
    if x.shape[0] > 1 and _table is not None and (y := _table.linear_silu_mul(x, weight, eps)) is not None:
        return y
    gate_up = linear(x, weight)
    return elementwise.silu_mul(gate_up) if eps is None else elementwise.silu_mul(gate_up, residual=x, eps=eps)


def _choose(x: Tensor, weight: Tensor) -> None:
    """The library that is the faster one for a product of torch's."""
    if x.is_cuda:
        aligned = x.element_size() == 2 and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0
        prefer(configs.blas_library(x.shape[0]) if aligned else "cublas")


def prefer(library: str) -> None:
    """Products of torch go through this library from here on."""
    global _preferred
    if library != _preferred:
        torch.backends.cuda.preferred_blas_library(library)
        _preferred = library
