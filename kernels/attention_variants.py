"""Launches of attention that compile_check compiles: over whole caches, shared prefixes, bytes and latents, with what writes bytes."""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from pagecast_kernels import configs, decode, decode_flat, prefill, rope, shared_prefix
from pagecast_kernels import latent as latent_ops

Variant = tuple[str, Callable[[], object]]
_ints = functools.partial(torch.zeros, dtype=torch.int32)


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
        counts = {"few": 2, "many": configs.MANY_PAIRS}
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
