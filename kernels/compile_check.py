"""Compiles every kernel for a GPU that need not be there, by its own launcher, and reports what the compiler made of it.

    PYTHONPATH=kernels python kernels/compile_check.py [--arch 90] [--only paged_decode]

For each variant: warps, registers, shared memory, stack (a stack in an attention kernel is a spill). Exits 1 if one fails, spills,
needs more shared memory than a program may have, or rounds float32 to TF32. Those of float32 may spill a little: that type is there to
compare with, not for speed.
"""

import argparse
import functools
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from one_row_variants import rotating_variants
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from pagecast_kernels import (
    all_reduce,
    configs,
    decode,
    decode_flat,
    elementwise,
    experts,
    gemv,
    invariant,
    logprobs,
    norms,
    prefill,
    rope,
    row_scales,
    sampling,
    shard_sampling,
    shared_prefix,
    steps,
    token_rules,
)  # fmt: skip
from pagecast_kernels import latent as latent_ops
from pagecast_kernels.routing import Routing

Variant = tuple[str, Callable[[], object]]
FLOAT32_STACK = 256
"""Bytes of a thread that a kernel of float32 may spill."""
MEASURED_STACK = {"paged_decode x512 h128 e4m3": 16}
"""The same of a launch that was measured to be faster than those that spill nothing."""


class _Absent:
    """What triton asks of a driver in order to compile, answered for a GPU of the given compute capability."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(arch: int) -> list[Any]:
    """From here on a launch compiles and starts nothing. Returns the list that gathers the compiled kernels."""
    driver.set_active(_Absent(arch))
    compiled: list[Any] = []
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(launch(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    jit.JITFunction.run = run
    configs.processors = lambda device: 132
    configs.arch = lambda device: arch
    return compiled


def usage(kernel: Any) -> dict[str, int]:
    """registers, stack bytes and shared bytes of a compiled kernel, from cuobjdump as triton ships it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention_variants() -> Iterator[Variant]:
    """Head sizes, group sizes, block sizes, dtypes, window and soft-cap, as models have them."""
    shapes = [(8, 2, 128, 16), (8, 2, 128, 64), (9, 3, 64, 16), (8, 1, 64, 32), (4, 4, 96, 16), (4, 2, 256, 16)]
    cases: list[tuple[tuple[int, ...], torch.dtype, dict[str, float]]] = [(shape, torch.bfloat16, {}) for shape in shapes]
    cases += [(shape, torch.float32, {}) for shape in (*shapes[::2], shapes[-1], (64, 2, 128, 16))]
    cases += [(shapes[0], torch.float16, {}), (shapes[0], torch.bfloat16, {"window": 1024}), (shapes[5], torch.bfloat16, {"softcap": 50.0})]
    for (heads, kv_heads, dim, size), dtype, options in cases:
        cache = torch.zeros((4, kv_heads, size, dim), dtype=dtype)
        q, table, index = torch.zeros((2, heads, dim), dtype=dtype), _ints(2, 64), _ints(2)
        name = f"h{dim} g{heads // kv_heads} page{size} {str(dtype)[6:]} {options or ''}"
        args = (cache, cache, table, index)
        if decode_flat.suits(q, cache, int(options.get("window", 0))):
            many = 2 if options else 64  # launches differ by how many sequences there are
            for count in (1, 2 if kv_heads > 4 else 5, many):
                flat = functools.partial(decode_flat.paged_decode, torch.zeros((count, heads, dim), dtype=dtype), cache, cache)
                work = decode_flat.step_workspace(count, heads, kv_heads, dim, "cpu")
                flat = functools.partial(flat, _ints(count, 64), _ints(count), _ints(count), 0.1, workspace=work)
                yield f"paged_decode_flat x{count} {name}", functools.partial(flat, softcap=options.get("softcap", 0.0))
        yield f"paged_decode {name}", lambda q=q, args=args, o=options: decode.paged_decode(q, *args, _ints(2), 0.1, **o)
        yield (
            f"paged_prefill {name}",
            lambda q=q, args=args, o=options: prefill.paged_prefill(q, *args, _ints(3), _ints(2), 0.1, max_query_len=64, **o),
        )


def shared_variants(dtype: torch.dtype) -> Iterator[Variant]:
    for heads, kv_heads, dim in ((8, 2, 128), (9, 3, 64), (4, 2, 256)):
        q, cache = torch.zeros((2, heads, dim), dtype=dtype), torch.zeros((4, kv_heads, 16, dim), dtype=dtype)
        shared = shared_prefix.SharedPrefixes(_ints(2), _ints(2), _ints(4, 4))
        args, name = (q, cache, cache, _ints(2, 64), _ints(2), _ints(2), 0.1, shared), f"h{dim} g{heads // kv_heads} {str(dtype)[6:]}"
        yield f"paged_decode_shared {name}", lambda args=args: shared_prefix.paged_decode_shared(*args)


def hopper_variants() -> Iterator[Variant]:
    """The Gluon kernels, which only Hopper has."""
    from pagecast_kernels import decode_hopper, prefill_hopper

    for kv_heads, size in ((2, 16), (1, 64)):
        q, cache = torch.zeros((2, 8, 128), dtype=torch.bfloat16), torch.zeros((4, kv_heads, size, 128), dtype=torch.bfloat16)
        args = (q, cache, cache, _ints(2, 64), _ints(2), _ints(3), _ints(2), 0.1, 64, q, configs.HOPPER_PREFILL)
        yield f"paged_prefill hopper g{8 // kv_heads} page{size}", lambda args=args: prefill_hopper.launch(*args)
    for heads, kv_heads, dim, size, dtype in (
        (8, 2, 128, 16, torch.bfloat16), (32, 8, 128, 32, torch.float16), (8, 8, 128, 8, torch.float16), (6, 2, 128, 64, torch.bfloat16),
        (16, 1, 128, 128, torch.bfloat16), (9, 3, 64, 16, torch.bfloat16), (16, 1, 64, 128, torch.float16),
    ):  # fmt: skip
        q, cache = torch.zeros((2, heads, dim), dtype=dtype), torch.zeros((4, kv_heads, size, dim), dtype=dtype)
        counts = {"few": 2, "several": configs.FEW_PAIRS // kv_heads, "many": configs.MANY_PAIRS}
        found = {kind: configs.decode_hopper(n, kv_heads, heads // kv_heads, dim, size, "cpu") for kind, n in counts.items()}
        for config, kind in {config: kind for kind, config in reversed(found.items()) if config}.items():
            work, tiles = decode.decode_workspace(2, heads, kv_heads, dim, "cpu"), decode_flat.tile_list(2, 64, size, config.tile, "cpu")
            args = (q, cache, cache, _ints(2), 0.1, tiles, work, q, config)
            yield f"paged_decode hopper {kind} h{dim} g{heads // kv_heads} page{size}", lambda args=args: decode_hopper.launch(*args)


def hopper_byte_variants() -> Iterator[Variant]:
    """The same over a cache of e4m3."""
    from pagecast_kernels import decode_hopper_bytes

    for heads, kv_heads, size, dtype in (
        (32, 8, 16, torch.bfloat16), (8, 2, 32, torch.float16), (4, 4, 16, torch.bfloat16), (16, 1, 128, torch.bfloat16),
        (12, 2, 64, torch.float16),
    ):  # fmt: skip
        q, cache = torch.zeros((2, heads, 128), dtype=dtype), torch.zeros((4, kv_heads, size, 128)).to(torch.float8_e4m3fn)
        for kind, count in (("few", 1), ("many", configs.MANY_PAIRS)):
            if (config := decode_hopper_bytes.config_for(count, kv_heads, heads // kv_heads, "cpu")) is None:
                continue
            work, tiles = decode.decode_workspace(2, heads, kv_heads, 128, "cpu"), decode_flat.tile_list(2, 64, size, config.tile, "cpu")
            scale = torch.ones(kv_heads)
            args = (q, cache, cache, _ints(2), 0.1, scale, scale, tiles, work, q, config)
            name = f"paged_decode hopper e4m3 {kind} g{heads // kv_heads} page{size}"
            yield name, lambda args=args: decode_hopper_bytes.launch(*args)


def wide_expert_variants() -> Iterator[Variant]:
    """The launches for many pairs an expert: Qwen3-30B-A3B whole and in four parts, whose sizes no tile divides."""
    for inner, dtype in ((768, torch.bfloat16), (192, torch.bfloat16), (768, torch.float16)):
        x, logits = (torch.empty((4096, size), dtype=dtype, device="meta") for size in (2048, 128))
        weights = tuple(torch.empty((128, *shape), dtype=dtype, device="meta") for shape in ((2 * inner, 2048), (2048, inner)))
        for least, *launches in configs.WIDE_EXPERTS:
            launch = functools.partial(experts.mixture, x, logits, *weights, Routing(8), config=tuple(launches))
            yield f"mixture wide above {least} inner {inner} {str(dtype)[6:]}", launch


def latent_hopper_variants() -> Iterator[Variant]:
    from pagecast_kernels import latent_hopper

    cases = ((16, 16, torch.bfloat16), (8, 64, torch.float16), (12, 128, torch.bfloat16), (4, 8, torch.bfloat16))
    for (heads, size, dtype), count in itertools.product(cases, (1, 64)):  # launches differ by how many sequences there are
        config = configs.latent_hopper(count, "cpu")
        q, rope = (torch.zeros((2, heads, dim), dtype=dtype) for dim in (512, 64))
        caches = [torch.zeros((4, 1, size, dim), dtype=dtype) for dim in (64, 512)]
        work, tiles = decode.decode_workspace(2, heads, 1, 512, "cpu"), decode_flat.tile_list(2, 64, size, config.tile, "cpu")
        args = (q, rope, *caches, _ints(2), 0.1, tiles, work, q, config)
        yield f"latent_decode paged hopper x{count} h{heads} page{size}", lambda args=args: latent_hopper.launch(*args)


def all_reduce_variants() -> Iterator[Variant]:
    """Sums over two to eight GPUs, alone and with what follows."""
    for ranks in (2, 3, 4, 8):
        peers = all_reduce.peers_over([0] * ranks, 0, 8192, 1024, "cpu")
        for tokens in (1, 256):
            x = torch.zeros((tokens, 8192), dtype=torch.bfloat16)
            yield f"all_reduce n{ranks} m{tokens}", lambda p=peers, x=x: all_reduce.all_reduce(x, p)
            if ranks != 3:
                yield f"all_reduce two shots n{ranks} m{tokens}", lambda p=peers, x=x: all_reduce.all_reduce(x, p, two_shots=True)
        wide = torch.zeros((16, 8192))
        yield f"all_reduce n{ranks} float32", lambda p=peers, x=wide: all_reduce.all_reduce(x, p)
        yield f"all_reduce residual n{ranks}", lambda p=peers, x=x: all_reduce.all_reduce(x, p, x.clone())
        yield f"all_reduce_add_rms_norm n{ranks}", lambda p=peers, x=x: all_reduce.all_reduce_add_rms_norm(x, x.clone(), x[0], 1e-5, p)


def shard_variants() -> Iterator[Variant]:
    """Draws from one rank's part of a vocabulary."""
    for dtype in (torch.bfloat16, torch.float32):
        floats, ints = torch.zeros(4), _ints(4)
        args = (torch.zeros((4, 16000), dtype=dtype), floats, ints, _ints(4, dtype=torch.int64), ints, ints, 16000)
        yield f"best_of_shard {str(dtype)[6:]}", lambda a=args: shard_sampling.best_of_shard(*a)


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


def byte_cache_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """Everything that touches the cache, where it is of e4m3."""
    name = "" if dtype == torch.bfloat16 else f" {str(dtype)[6:]}"
    for heads, kv_heads, dim in ((8, 2, 128), (9, 3, 64), (4, 4, 96)):
        cache, q = torch.zeros((4, kv_heads, 16, dim)).to(torch.float8_e4m3fn), torch.zeros((2, heads, dim), dtype=dtype)
        scales = {"k_scale": torch.ones(kv_heads), "v_scale": torch.ones(kv_heads)}
        folded = scales | {"residual": torch.zeros((2, 4096), dtype=dtype)}
        args = (q, cache, cache, _ints(2, 64), _ints(2))
        for count in (2, configs.MANY_PAIRS):  # launches differ by how many sequences there are
            lengths, many = (_ints(count, 64), _ints(count), _ints(count)), torch.zeros((count, heads, dim), dtype=dtype)
            yield (
                f"paged_decode x{count} h{dim} e4m3{name}",
                lambda q=many, c=cache, n=lengths, s=scales: decode.paged_decode(q, c, c, *n, 0.1, **s),
            )
        yield (
            f"paged_prefill h{dim} e4m3{name}",
            lambda a=args, s=scales: prefill.paged_prefill(*a, _ints(3), _ints(2), 0.1, max_query_len=64, **s),
        )
        qkv, slots = torch.zeros((2, (heads + 2 * kv_heads) * dim), dtype=dtype), _ints(2, dtype=torch.int64)
        shape = (heads, kv_heads, dim)
        for kind, options in (("", scales), (" scaled", folded)):
            yield (
                f"rope_and_write_kv{kind} h{dim} e4m3{name}",
                lambda q=qkv, c=cache, s=slots, n=shape, o=options: rope.rope_and_write_kv(
                    q, torch.zeros(64, n[2]), _ints(2), s, c, c, *n, **o
                ),
            )  # fmt: skip


def row_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """What is computed row by row."""
    name = str(dtype)[6:]
    x = torch.zeros((2, 4096), dtype=dtype)
    yield f"rms_norm {name}", lambda: norms.rms_norm(x, x[0], 1e-5)
    yield f"add_rms_norm {name}", lambda: norms.add_rms_norm(x, x.clone(), x[0], 1e-5)
    yield f"silu_mul {name}", lambda: elementwise.silu_mul(x)
    yield f"gelu_mul {name}", lambda: elementwise.gelu_mul(x)
    yield f"embedding {name}", lambda: elementwise.embedding(_ints(2), x)
    cache = torch.zeros((4, 8, 16, 128), dtype=dtype)
    yield f"copy_blocks {name}", lambda: elementwise.copy_blocks(cache, cache, _ints(2), _ints(2))
    qkv, slots = torch.zeros((2, 48 * 128), dtype=dtype), _ints(2, dtype=torch.int64)
    for norm in (None, x[0, :128]):
        yield (
            f"rope_and_write_kv{'' if norm is None else ' normed'} {name}",
            lambda norm=norm: rope.rope_and_write_kv(
                qkv, torch.zeros(64, 128), _ints(2), slots, cache, cache, 32, 8, 128, norm, norm
            ),
        )  # fmt: skip
    for launch in row_scales.LAUNCHES if dtype == torch.bfloat16 else ():
        residual = torch.zeros((launch.rows, 4096), dtype=dtype)
        wide = torch.zeros((launch.rows, 28672), dtype=dtype)
        yield f"silu_mul scaled x{launch.rows} {name}", lambda wide=wide, residual=residual: elementwise.silu_mul(wide, residual=residual)
        for dim, norm in ((128, None), (128, x[0, :128]), (64, None), (96, None)):
            cache = torch.zeros((4, 8, 16, dim), dtype=dtype)
            yield (
                f"rope_and_write_kv scaled{'' if norm is None else ' normed'} h{dim} x{launch.rows} {name}",
                lambda n=launch.rows, dim=dim, norm=norm, cache=cache, wide=wide, residual=residual: rope.rope_and_write_kv(
                    wide[:, : 48 * dim], torch.zeros(64, dim), _ints(n), _ints(n, dtype=torch.int64), cache, cache, 32, 8, dim, norm, norm,
                    residual=residual, bias=wide[0, : 48 * dim],
                ),
            )  # fmt: skip
    yield f"invariant_linear {name}", lambda: invariant.invariant_linear(x, torch.zeros((512, 4096), dtype=dtype))
    for depth in (4096, 576):
        one, weight = x[:1, :depth].contiguous(), torch.zeros((64, depth), dtype=dtype)
        yield f"gemv {depth} {name}", lambda one=one, weight=weight: gemv.gemv(one, weight)
        yield f"gemv_add {depth} {name}", lambda one=one, weight=weight: gemv.gemv_add(one, weight, x[:1, :64].contiguous())
        yield f"norm_gemv {depth} {name}", lambda one=one, weight=weight: gemv.norm_gemv(one, one[0], 1e-5, weight)
        yield f"norm_gemv_silu_mul {depth} {name}", lambda one=one, weight=weight: gemv.norm_gemv_silu_mul(one, one[0], 1e-5, weight)


def step_variants() -> Iterator[Variant]:
    """What steps begin and end with."""
    scalars, seeds, row = _ints(8, 17), _ints(17, dtype=torch.int64), _ints(2)
    yield "gather_rows", lambda: steps.gather_rows(row, scalars, seeds, _ints(17, 64), 16)
    padded = (row, *(_ints(8) for _ in range(3)), row, row, scalars, seeds, _ints(17, 64))
    yield "gather_padded", lambda: steps.gather_padded(*padded, 16, 16)
    yield "finish_rows", lambda: steps.finish_rows(row, row, row, scalars, _ints(17, 160), 1, 2)
    for dtype in (torch.bfloat16, torch.float32):
        logits, f = torch.zeros((2, 128256), dtype=dtype), torch.zeros(2)
        args = (f, _ints(2), f, f, _ints(2, dtype=torch.int64), _ints(2), _ints(2))
        yield f"sample {str(dtype)[6:]}", lambda logits=logits, args=args: sampling.sample(logits, *args)
        yield f"adjust_logits {str(dtype)[6:]}", lambda logits=logits: _rules(logits)
        yield f"top_logprobs {str(dtype)[6:]}", lambda logits=logits: logprobs.top_logprobs(logits, _ints(2), 5)


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


def _rules(logits: torch.Tensor) -> None:
    vocab, row = logits.shape[1], _ints(2)
    counts, words, recent = _ints(4, vocab), _ints(4, 128, 16), _ints(4, 15)
    adjusted = token_rules.adjust_logits(
        logits, row, row, row, counts, counts.float(), torch.zeros(4, 3), _ints(2, -(-vocab // 32)), row
    )  # fmt: skip
    token_rules.forbid_tokens(adjusted, row, row, words, recent, _ints(4, 160))
    token_rules.note_tokens(row, row, row, counts, recent)


def latent_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """DeepSeek-V2-Lite, and V2 or V3 whole."""
    name = str(dtype)[6:]
    for heads in (16, 128):
        q, rope, slots = torch.zeros((2, heads, 192), dtype=dtype), _ints(2), _ints(2, dtype=torch.int64)
        k_cache, v_cache = (torch.zeros((4, 1, 16, dim), dtype=dtype) for dim in (64, 512))
        kv, latent = torch.zeros((2, 576), dtype=dtype), torch.zeros((2, heads, 512), dtype=dtype)
        caches = (k_cache, v_cache)
        write = (q[..., 128:], kv, kv[0, :512], 1e-6, torch.zeros(64, 64), rope, slots, *caches)
        yield f"latent_rope_and_write h{heads} {name}", lambda write=write: latent_ops.latent_rope_and_write(*write)
        args = (latent, q[..., 128:].contiguous(), *caches, _ints(2, 64), _ints(2))
        yield f"latent_decode paged h{heads} {name}", lambda args=args: latent_ops.latent_decode(*args, _ints(2), 0.1)
        yield (
            f"latent_prefill paged h{heads} {name}",
            lambda args=args: latent_ops.latent_prefill(*args, _ints(3), _ints(2), 0.1, max_query_len=64),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", default="", help="variants whose name holds this")
    args = parser.parse_args()
    compiled = compile_only(args.arch)
    bad = 0
    kinds = (hopper_variants, hopper_byte_variants, latent_hopper_variants, wide_expert_variants, rotating_variants)
    hopper = [variant for kind in kinds for variant in kind()] if args.arch == 90 else []
    every = [*attention_variants(), *hopper, *all_reduce_variants(), *shard_variants(), *quantized_variants(), *step_variants()]
    every += quantized_expert_variants()
    for variants in (shared_variants, byte_cache_variants, latent_variants, row_variants, expert_variants):
        every += [*variants(torch.bfloat16), *variants(torch.float32)]
    for name, launch in every:
        if args.only not in name:
            continue
        compiled.clear()
        try:
            launch()
        except configs.UnsupportedError as error:
            print(f"{name}: refused, {error}")
            continue
        except Exception as error:
            bad += 1
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}")
            continue
        for kernel in compiled:
            used = usage(kernel)
            allowed = FLOAT32_STACK if "float32" in name else MEASURED_STACK.get(name, 0)
            spilled = used["stack"] > allowed and any(kind in name for kind in ("paged", "mixture", "heads"))
            rounds = ".tf32" in kernel.asm["ptx"]
            large = used["shared"] > configs.shared_memory_of(args.arch)
            bad += spilled or large or rounds
            figures = (f"{key} {value:<6}" for key, value in used.items())
            print(f"{name:48} {kernel.metadata.name:20}", *figures, "SPILLS" * spilled, "TOO LARGE" * large, "TF32" * rounds)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
