"""Heads that the one-row product rotates and writes itself are, bit for bit, those that another launch would have made of its result."""

import pytest
import torch

from pagecast_kernels.gemv import GemvConfig, norm_gemv, norm_gemv_heads
from pagecast_kernels.quantized_gemv import packed_gemv, scaled_gemv
from pagecast_kernels.quantized_weights import pack
from pagecast_kernels.rope import rope_and_write_kv
from pagecast_kernels.rotated import Heads

HEADS, KV_HEADS, BLOCK = 3, 2, 8


@pytest.mark.parametrize(("kind", "dim"), [("plain", 32), ("plain", 96), ("packed", 128), ("rows", 128), ("bytes", 128), ("scaled", 64)])
@pytest.mark.parametrize("slot", [13, -1])
def test_heads_are_those_of_two_launches(kind: str, dim: int, slot: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    rows, depth = (HEADS + 2 * KV_HEADS) * dim, 256
    x, gamma, bias = normal(1, depth).bfloat16(), normal(depth).bfloat16(), normal(rows).bfloat16()
    cos_sin, position, at = normal(8, dim), torch.tensor([5], dtype=torch.int32), torch.tensor([slot])
    if kind == "plain":
        weight = normal(rows, depth).bfloat16()
        config = GemvConfig(8, 128, 2, 4)
        product = lambda heads: (
            norm_gemv(x, gamma, 1e-5, weight, bias, None, config)
            if heads is None
            else norm_gemv_heads(x, gamma, 1e-5, weight, heads, bias, config)
        )
    elif kind == "scaled":
        values, scales = normal(rows, depth).to(torch.float8_e4m3fn), normal(rows).abs()
        product = lambda heads: scaled_gemv(x, values, scales, gamma=gamma, eps=1e-5, bias=bias, heads=heads)
    else:
        stored = torch.randint(0, 256 if kind == "bytes" else 16, (rows, depth), generator=generator, dtype=torch.uint8)
        group = 128 if kind == "packed" else 0
        packed = pack("int8" if kind == "bytes" else "int4", stored, normal(rows, 2 if group else 1).abs(), None, group)
        product = lambda heads: packed_gemv(x, packed, gamma=gamma, eps=1e-5, bias=bias, heads=heads)
    apart, together = ([torch.full((3, KV_HEADS, BLOCK, dim), 7.0, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2))
    expected = rope_and_write_kv(product(None), cos_sin, position, at, *apart, HEADS, KV_HEADS, dim)
    assert torch.equal(product(Heads(cos_sin, position, at, *together, HEADS)), expected)
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])
    assert bool((apart[0] != 7.0).any()) == (slot >= 0)
