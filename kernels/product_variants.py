"""Launches of products that compile_check compiles: of quantized weights and of experts, whole or quantized."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pagecast_kernels import expert_configs, experts
from pagecast_kernels.routing import Routing

Variant = tuple[str, Callable[[], object]]
_ints = functools.partial(torch.zeros, dtype=torch.int32)


def quantized_variants() -> Iterator[Variant]:
    """Products of packed words and of 8-bit operands, and what makes 8-bit activations."""
    from pagecast_kernels import quantized_gemv, quantized_products, quantized_rows, scaled_products
    from pagecast_kernels.quantized_weights import PackedWeight, tile_columns

    x = torch.zeros((64, 4096), dtype=torch.bfloat16)
    cases: list[tuple[Any, int, bool, bool, int]] = [
        ("int4", 128, False, False, 1), ("int4", 128, False, True, 1), ("int4", 128, True, False, 64), ("int4", 64, True, False, 1),
        ("int4", 32, False, False, 20), ("int4", 0, False, False, 1), ("int8", 128, True, False, 1), ("int8", 0, False, False, 64),
        ("int8", 32, False, False, 1), ("fp8", 128, False, False, 1), ("fp8", 0, False, True, 1),
    ]  # fmt: skip
    for kind, group, zeros, paired, rows in cases:
        groups = 4096 // group if group else 1
        zero = torch.zeros(groups, 256) if zeros else None
        words = _ints(4, 4096 // tile_columns(kind), 1024)
        weight = PackedWeight(kind, 256, 4096, group, words, torch.zeros(groups, 256), zero, paired)
        for dtype in (torch.bfloat16, torch.float16):
            name = f"packed_product {kind} g{group}{' zeros' * zeros}{' gated' * paired} m{rows} {str(dtype)[6:]}"
            yield name, lambda w=weight, r=rows, d=dtype, p=paired: quantized_products.packed_product(x[:r].to(d), w, gated=p)
        if quantized_gemv.knows_packed(weight):
            shape = f"{kind} g{group}{' zeros' * zeros}{' gated' * paired}"
            yield f"packed_gemv {shape}", lambda w=weight: quantized_gemv.packed_gemv(x[:1], w)
            yield f"norm packed_gemv {shape}", lambda w=weight: quantized_gemv.packed_gemv(x[:1], w, gamma=x[0], eps=1e-5)
            if not paired:
                yield f"packed_gemv add {shape}", lambda w=weight: quantized_gemv.packed_gemv(x[:1], w, residual=x[:1, :256].contiguous())
        out = torch.zeros((256, 4096), dtype=torch.bfloat16)
        yield f"unpack_weight {kind} g{group}", lambda w=weight, out=out: quantized_products.unpack_weight(w, out)
    tiles = quantized_products.WIDE_TILES  # as in an output head
    wide = PackedWeight("int8", 64 * tiles, 512, 0, _ints(tiles, 8, 1024), torch.zeros(1, 64 * tiles))
    for rows in (16, 32, 64, 128, 256):
        x_wide = torch.zeros((rows, 512), dtype=torch.bfloat16)
        yield f"packed_product head m{rows}", lambda x=x_wide: quantized_products.packed_product(x, wide)
    eight = (torch.zeros((256, 4096)).to(torch.float8_e4m3fn), torch.zeros(256))
    yield "norm scaled_gemv", lambda: quantized_gemv.scaled_gemv(x[:1], *eight, gamma=x[0], eps=1e-5)
    yield "norm scaled_gemv gated", lambda: quantized_gemv.scaled_gemv(x[:1], *eight, gamma=x[0], eps=1e-5, gated=True)
    yield "scaled_gemv add", lambda: quantized_gemv.scaled_gemv(x[:1], *eight, residual=x[:1, :256].contiguous())
    for dtype in (torch.float8_e4m3fn, torch.int8):
        row, scale = x.to(dtype), torch.zeros(64)
        for rows in (1, 64):
            args = (row[:rows], scale[:rows], torch.zeros((256, 4096)).to(dtype), torch.zeros(256))
            yield f"scaled_product {str(dtype)[6:]} m{rows}", lambda a=args: scaled_products.scaled_product(*a, dtype=torch.bfloat16)
        yield f"silu_mul_quantized {str(dtype)[6:]}", lambda d=dtype: quantized_rows.silu_mul_quantized(x, d)
        yield (
            f"add_rms_norm_quantized {str(dtype)[6:]}",
            lambda d=dtype: quantized_rows.add_rms_norm_quantized(x, x.clone(), x[0], 1e-5, d),
        )


def expert_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Qwen3-30B-A3B, Mixtral, DeepSeek-V3 and sizes that no tile divides, from one token to a whole batch."""
    for name, count, hidden, inner, routing in (
        ("qwen3", 128, 2048, 768, Routing(8)),
        ("mixtral", 8, 4096, 14336, Routing(2)),
        ("odd", 6, 208, 80, Routing(2)),
        ("deepseek", 256, 7168, 2048, Routing(8, sigmoid=True, scale=2.5, groups=8, chosen_groups=4, group_top=2)),
    ):
        for tokens in (1, 256, 4096):
            x, logits = (torch.empty((tokens, size), dtype=dtype, device="meta") for size in (hidden, count))
            gate_up = torch.empty((count, 2 * inner, hidden), dtype=dtype, device="meta")
            down, bias = torch.empty((count, hidden, inner), dtype=dtype, device="meta"), torch.empty(count, device="meta")
            args = (x, logits, gate_up, down, routing)
            bias = bias if routing.sigmoid else None
            yield f"mixture {name} {tokens} {str(dtype)[6:]}", lambda args=args, bias=bias: experts.mixture(*args, bias=bias)


def wide_expert_variants() -> Iterator[Variant]:
    """The launches for many pairs an expert: Qwen3-30B-A3B whole and in four parts, whose sizes no tile divides."""
    for inner, dtype in ((768, torch.bfloat16), (192, torch.bfloat16), (768, torch.float16)):
        x, logits = (torch.empty((4096, size), dtype=dtype, device="meta") for size in (2048, 128))
        weights = tuple(torch.empty((128, *shape), dtype=dtype, device="meta") for shape in ((2 * inner, 2048), (2048, inner)))
        for least, *launches in expert_configs.WIDE_EXPERTS:
            launch = functools.partial(experts.mixture, x, logits, *weights, Routing(8), config=tuple(launches))
            yield f"mixture wide above {least} inner {inner} {str(dtype)[6:]}", launch


def quantized_expert_variants() -> Iterator[Variant]:
    """The same with weights of 4 and 8 bits: groups, blocks, whole rows, act-order, activations of 8 bits."""
    from pagecast_kernels.quantized_weights import PackedExperts, ScaledExperts, tile_columns

    def weight(kind: Any, count: int, rows: int, columns: int, group: int, zeros: bool, paired: bool, ordered: bool) -> PackedExperts:
        deep = -(-columns // 128) * 128
        high = -(-rows // 64) * 64
        words = torch.empty((count, high // 64, deep // tile_columns(kind), 1024), dtype=torch.int32, device="meta")
        scales = torch.empty((count, deep // group if group else 1, high), device="meta")
        order = torch.empty((count, columns), dtype=torch.int32, device="meta") if ordered else None
        return PackedExperts(kind, rows, columns, group, words, scales, scales if zeros else None, paired, order)

    kinds: list[tuple[Any, int, bool, bool]] = [
        ("int4", 128, False, False), ("int4", 32, True, True), ("fp8", 128, False, False), ("int4", 0, True, False),
        ("int8", 128, True, False), ("fp8", 0, False, False),
    ]  # fmt: skip
    cases: list[tuple[str, int, int, int, int, torch.dtype]] = [
        ("qwen3", 128, 2048, 768, 256, torch.bfloat16), ("qwen3", 128, 2048, 768, 1, torch.bfloat16),
        ("qwen3", 128, 2048, 768, 4096, torch.bfloat16), ("qwen3", 128, 2048, 768, 256, torch.float16),
        ("odd", 6, 208, 80, 20, torch.bfloat16),
    ]  # fmt: skip
    routing = Routing(2)
    for number, (name, count, hidden, inner, tokens, dtype) in enumerate(cases):
        x, logits = (torch.empty((tokens, size), dtype=dtype, device="meta") for size in (hidden, count))
        for kind, group, zeros, ordered in kinds if number == 0 else kinds[number % 2 : number % 2 + 1]:
            first = weight(kind, count, 2 * inner, hidden, group, zeros, inner % 8 == 0, ordered)
            second = weight(kind, count, hidden, inner, group, zeros, False, ordered)
            label = f"mixture {name} {tokens} {kind} g{group}{' zeros' * zeros}{' ordered' * ordered} {str(dtype)[6:]}"
            yield label, lambda args=(x, logits, first, second): experts.mixture(*args, routing)
        for kind in (torch.float8_e4m3fn, torch.int8) if number == 0 else (torch.float8_e4m3fn,):
            first, second = (
                ScaledExperts(torch.empty((count, *shape), dtype=kind, device="meta"), torch.empty((count, shape[0]), device="meta"))
                for shape in ((2 * inner, hidden), (hidden, inner))
            )
            label = f"mixture {name} {tokens} scaled {str(kind)[6:]} {str(dtype)[6:]}"
            yield label, lambda args=(x, logits, first, second): experts.mixture(*args, routing)
