"""Launches of one row that compile_check compiles beside those of kernels on their own."""

from collections.abc import Callable, Iterator

import torch

from pagecast_kernels import gemv
from pagecast_kernels.quantized_gemv import packed_gemv, scaled_gemv
from pagecast_kernels.quantized_weights import pack
from pagecast_kernels.rotated import Heads


def rotating_variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """Products of one row that rotate heads, which Hopper alone does."""
    weight, cache = torch.zeros((48 * 128, 1024), dtype=torch.bfloat16), torch.zeros((4, 8, 16, 128), dtype=torch.bfloat16)
    x, values, scales = weight[:1], torch.zeros(weight.shape, dtype=torch.uint8), torch.ones(len(weight), 8)
    packed, eight = pack("int4", values, scales, None, 128), (values.view(torch.float8_e4m3fn), scales[:, 0].contiguous())
    by_row = pack("int8", values, scales[:, :1], None, 0)
    heads = Heads(torch.zeros(64, 128), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), cache, cache, 32)
    yield "norm_gemv_heads", lambda: gemv.norm_gemv_heads(x, x[0], 1e-5, weight, heads)
    yield "packed_gemv heads", lambda: packed_gemv(x, packed, gamma=x[0], eps=1e-5, heads=heads)
    yield "packed_gemv int8 heads", lambda: packed_gemv(x, by_row, gamma=x[0], eps=1e-5, heads=heads)
    yield "scaled_gemv heads", lambda: scaled_gemv(x, *eight, gamma=x[0], eps=1e-5, heads=heads)
