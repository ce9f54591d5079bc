"""Launches that compile_check compiles of what goes by rows: norms, activations, products of one row, draws, and sums over GPUs."""

import functools
from collections.abc import Callable, Iterator

import torch

from pagecast_kernels import (
    all_reduce,
    configs,
    elementwise,
    gemv,
    invariant,
    logprobs,
    norms,
    rope,
    row_scales,
    sampling,
    shard_sampling,
    steps,
    token_rules,
)  # fmt: skip

Variant = tuple[str, Callable[[], object]]
_ints = functools.partial(torch.zeros, dtype=torch.int32)


def _on_hopper(launch: Callable[[], object]) -> object:
    """What a launch is where the launch after it may begin early."""
    before = configs.is_hopper
    configs.is_hopper = lambda device: True  # type: ignore[assignment]
    try:
        return launch()
    finally:
        configs.is_hopper = before


def telling_variants() -> Iterator[Variant]:
    """Rotation as it is before decode attention of Hopper, and sampling, whose launches wait by themselves there."""
    for name, launch in (*row_variants(torch.bfloat16), *step_variants()):
        if name.startswith(("rope", "sample")):
            yield f"{name} telling", functools.partial(_on_hopper, launch)


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
        for rows in (2, 64):  # few are drawn from by other programs than many
            logits, f = torch.zeros((rows, 128256), dtype=dtype), torch.zeros(rows)
            args = (f, _ints(rows), f, f, _ints(rows, dtype=torch.int64), _ints(rows), _ints(rows))
            yield f"sample x{rows} {str(dtype)[6:]}", lambda logits=logits, args=args: sampling.sample(logits, *args)
        logits = logits[:2]
        yield f"adjust_logits {str(dtype)[6:]}", lambda logits=logits: _rules(logits)
        yield f"top_logprobs {str(dtype)[6:]}", lambda logits=logits: logprobs.top_logprobs(logits, _ints(2), 5)


def _rules(logits: torch.Tensor) -> None:
    vocab, row = logits.shape[1], _ints(2)
    counts, words, recent = _ints(4, vocab), _ints(4, 128, 16), _ints(4, 15)
    adjusted = token_rules.adjust_logits(
        logits, row, row, row, counts, counts.float(), torch.zeros(4, 3), _ints(2, -(-vocab // 32)), row
    )  # fmt: skip
    token_rules.forbid_tokens(adjusted, row, row, words, recent, _ints(4, 160))
    token_rules.note_tokens(row, row, row, counts, recent)


def shard_variants() -> Iterator[Variant]:
    """Draws from one rank's part of a vocabulary."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (4, 64):
            floats, ints = torch.zeros(rows), _ints(rows)
            args = (torch.zeros((rows, 16000), dtype=dtype), floats, ints, _ints(rows, dtype=torch.int64), ints, ints, 16000)
            yield f"best_of_shard x{rows} {str(dtype)[6:]}", lambda a=args: shard_sampling.best_of_shard(*a)


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
