"""All matrix products of one decode step in one CUDA graph, every layer with weights of its own: what cuBLAS and we need for them."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagecast_kernels import bench_cases, products, reference

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
LAYERS = 32


def weights() -> list[Tensor]:
    """16 GB of random bf16 in the order a step reads them; none are zeros."""
    shapes = [shape for _ in range(LAYERS) for shape in LLAMA_8B.values()] + [HEAD]
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes]


def step_ms(all_weights: list[Tensor], rows: int, product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Milliseconds of one step's products for `rows` rows."""
    inputs = {k: torch.empty((rows, k), dtype=torch.bfloat16, device="cuda").normal_() for k in (4096, 14336)}

    def step() -> None:
        for weight in all_weights:
            product(inputs[weight.shape[1]], weight)

    return bench_cases.graph_us([step]) / 1e3


def measure() -> dict[str, float]:
    """kernels.gemm8b.M<rows>.ms by what serving uses for that many rows, and .cublas_ms beside it."""
    found: dict[str, float] = {}
    all_weights = weights()
    products.prepare(all_weights[0].device)
    for rows in (1, 8, 16, 32, 64, 96, 128, 192, 256):
        products.prefer("cublas")
        library = step_ms(all_weights, rows, reference.linear)
        ours = step_ms(all_weights, rows, products.linear)
        found |= {f"kernels.gemm8b.M{rows}.ms": ours, f"kernels.gemm8b.M{rows}.cublas_ms": library}
        print(f"products of an 8B step, M={rows}: {ours:.3f} ms, cuBLAS {library:.3f} ms", flush=True)
    return found
