"""The product of a layer by whatever is fastest for its number of rows: ours for one, else one of two libraries."""

import torch
from torch import Tensor

from pagecast_kernels import configs, reference
from pagecast_kernels.gemv import gemv

_preferred = ""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See reference.linear. Called from one thread: torch's choice of library is one for the process."""
    # Of one row a product is nothing but reading the weight, which costs cuBLAS a tenth more (H200, 8B parameters).
    if x.shape[0] == 1 and x.dtype != torch.float32 and x.shape[1] % 8 == 0:
        return gemv(x, weight, bias)
    if x.is_cuda:
        aligned = x.element_size() == 2 and x.shape[1] % 8 == 0 and weight.shape[0] % 8 == 0
        prefer(configs.blas_library(x.shape[0]) if aligned else "cublas")
    return reference.linear(x, weight, bias)


def prefer(library: str) -> None:
    """Products of torch go through this library from here on."""
    global _preferred
    if library != _preferred:
        torch.backends.cuda.preferred_blas_library(library)
        _preferred = library
