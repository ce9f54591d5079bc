"""Checks every kernel on the GPU against float64, measures it beside FlashAttention 3, and tries other launches.

    PYTHONPATH=kernels python kernels/gpu_check.py [--parts check,decode,prefill,mixed,sample,small] [--quick]

Outputs are poisoned with NaN before each check. Launches are compiled first, in parallel, by processes that need no GPU.
Writes gpu_check.json to $OUT where that is set.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]

import compile_check  # noqa: E402
import gpu_check_attention  # noqa: E402
import row_variants  # noqa: E402
from ops import paged_case  # noqa: E402

from pagecast_kernels import bench_cases, configs, decode, elementwise, gemv, logprobs, norms, prefill, reference, rope, sampling  # noqa: E402
from pagecast_kernels.rotated import Heads  # noqa: E402

ANCHORS = Path(__file__).parent.parent / "benchmarks/anchors.json"
SMS = 132
DECODE = {f"{batch}x{length}": [length] * batch for batch, length in (
    (1, 1024), (1, 4096), (1, 32768), (8, 1024), (8, 4096), (16, 32768), (64, 1024), (64, 4096), (256, 1024), (256, 4096))}  # fmt: skip
RAGGED = {f"ragged{batch}": bench_cases.ragged(batch) for batch in (64, 256)}
PREFILL = {"1x2048": [2048], "4x2048": [2048] * 4, "1x8192": [8192], "1x32768": [32768]}
DECODE_LAUNCHES = [
    configs.Decode(tile, warps, stages, per * SMS, registers)
    for tile, warps, stages, per, registers in (
        (64, 2, 3, 2, 255), (64, 2, 3, 3, 255), (64, 4, 3, 2, 255), (64, 4, 3, 3, 168), (128, 4, 2, 2, 255), (128, 4, 3, 1, 255),
        (32, 4, 4, 3, 168), (32, 2, 4, 4, 255), (32, 2, 5, 3, 255), (64, 2, 4, 2, 255), (64, 2, 2, 4, 255), (64, 4, 4, 2, 255),
    )
]  # fmt: skip
PREFILL_LAUNCHES = [configs.Prefill(128, 64, 8, 3), configs.Prefill(128, 64, 8, 4), configs.Prefill(128, 128, 8, 3)]
HOPPER_LAUNCHES = [configs.HopperPrefill(128, 2), configs.HopperPrefill(64, 4), configs.HopperPrefill(64, 3)]
CHECK_LENS = [1, 15, 16, 17, 0, 63, 64, 65, 700, 3000, 129]
CHECK_CHUNKS = [(1, 1), (17, 17), (640, 5), (333, 333), (0, 0), (1300, 1), (1000, 400), (33, 32)]  # (seq_len, query_len)
CHECK_SAMPLES = ((128256, 49152, 5000), (torch.bfloat16, torch.float32))
SAMPLING = {
    "greedy": ({"temperature": 0.0}, False), "plain": ({}, False), "greedy in a filtered batch": ({"temperature": 0.0}, True),
    "top_k 50": ({"top_k": 50}, True), "top_k 50 top_p 0.9": ({"top_k": 50, "top_p": 0.9}, True), "top_p 0.9": ({"top_p": 0.9}, True),
    "min_p 0.05": ({"min_p": 0.05}, True),
}  # fmt: skip


# --- compile ahead -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A launch to compile: what its kernel is specialised on, apart from the launch table's choice."""

    kind: str
    config: Any
    count: int
    shape: tuple[int, int, int, int] = (bench_cases.HEADS, bench_cases.KV_HEADS, bench_cases.DIM, bench_cases.BLOCK_SIZE)
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, float], ...] = ()


def _launch_stand_in(job: Job) -> None:
    """Launch with tensors that have next to nothing in them, but specialise the kernel as the real ones do."""
    index = torch.zeros(job.count + 1, dtype=torch.int32)
    if job.kind == "sample":
        logits, f, i = torch.zeros((job.count, job.shape[0]), dtype=job.dtype), torch.zeros(job.count), index[:-1]
        sampling.sample(logits, f, i, f, f, i.long(), i, i, filtered=bool(job.config))
        return
    heads, kv_heads, dim, size = job.shape
    cache = torch.zeros((1, kv_heads, size, dim), dtype=job.dtype)
    q, table = torch.zeros((job.count, heads, dim), dtype=job.dtype), torch.zeros((job.count, 16), dtype=torch.int32)
    options: dict[str, Any] = dict(job.options)
    if job.kind == "decode":
        decode.paged_decode(q, cache, cache, table, index[:-1], index[:-1], dim**-0.5, config=job.config, **options)
    else:
        prefill.paged_prefill(
            q, cache, cache, table, index[:-1], index, index[:-1], dim**-0.5, max_query_len=64, config=job.config, **options
        )  # fmt: skip


def compile_job(job: Job | None) -> str:
    """Fill the kernel cache for one launch, or with None for all small kernels; returns a note. Runs in a process without a GPU."""
    compiled = compile_check.compile_only(90)
    try:
        if job is None:
            for _, launch in itertools.chain(row_variants.row_variants(torch.bfloat16), row_variants.step_variants()):
                launch()
            return ""
        _launch_stand_in(job)
        used = compile_check.usage(compiled[-1])
    except Exception as error:
        return f"{job} {type(error).__name__}: {str(error)[:160]}"
    return f"{job.kind} {job.config} {job.shape} spills {used}" if used["stack"] > 0 and job.kind != "sample" else ""


def jobs(parts: set[str], quick: bool) -> list[Job | None]:
    found: list[Job | None] = [None]
    if "check" in parts:
        for kind, count in (("decode", len(CHECK_LENS)), ("prefill", len(CHECK_CHUNKS))):
            found += [Job(kind, None, count, shape, dtype, options) for shape, dtype, options in check_shapes()]
        samples = itertools.product(*CHECK_SAMPLES, (True, False))
        found += [Job("sample", filtered, 64, (vocab, 0, 0, 0), dtype) for vocab, dtype, filtered in samples]
    if parts & {"check", "decode"}:
        found += [Job("decode", c, len(lens)) for c in [None, *decode_launches(quick)] for lens in (DECODE | RAGGED).values()]
    if parts & {"check", "prefill", "mixed"}:
        found += [Job("prefill", c, len(lens)) for c in [None, *prefill_launches(quick)] for lens in PREFILL.values()]
    if "sample" in parts:
        found += [Job("sample", filtered, batch, (128256, 0, 0, 0)) for batch in (256, 1) for filtered in (True, False)]
    return list(dict.fromkeys(found))


def compile_ahead(parts: set[str], quick: bool) -> None:
    todo, begin = jobs(parts, quick), time.perf_counter()
    with ProcessPoolExecutor(min(15, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        notes = sorted({note for note in pool.map(compile_job, todo) if note})
    print(f"compiled {len(todo)} launches ahead in {time.perf_counter() - begin:.0f} s", *notes, sep="\n  ", flush=True)


def decode_launches(quick: bool) -> list[configs.Decode]:
    return DECODE_LAUNCHES[:1] if quick else DECODE_LAUNCHES


def prefill_launches(quick: bool) -> list[configs.Prefill | configs.HopperPrefill]:
    return PREFILL_LAUNCHES[:1] if quick else PREFILL_LAUNCHES + (HOPPER_LAUNCHES if hopper_works() else [])


@functools.cache
def hopper_works() -> bool:
    """Run the warp-specialised kernels' checks in a process of their own: a fault there would hang or end this one."""
    try:
        done = subprocess.run([sys.executable, __file__, "--parts", "hopper"], timeout=120, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        print("hopper: HANGS", flush=True)
        return False
    print(f"hopper: rc {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
    return done.returncode == 0


def check_hopper() -> Iterator[tuple[str, float]]:
    chunks = [*CHECK_CHUNKS, (2048, 2048), (131, 131), (4000, 7), (129, 1)]
    lens, query_lens = [list(x) for x in zip(*chunks)]
    first, second = HOPPER_LAUNCHES[:2]
    for heads, kv_heads, size, dtype, config in (
        (32, 8, 16, torch.bfloat16, first), (32, 8, 16, torch.bfloat16, second), (32, 8, 16, torch.float16, first),
        (4, 4, 32, torch.bfloat16, second), (6, 2, 64, torch.bfloat16, first), (8, 1, 128, torch.bfloat16, second),
    ):
        case = paged_case.make(heads, lens, query_lens, heads, kv_heads, 128, size, dtype, "cuda")
        exact = case.to(torch.float64)
        tables = (case.block_table, case.rows, case.starts, case.seq_lens, 0.09)
        out = torch.full_like(case.q, float("nan"))
        prefill.paged_prefill(case.q, case.k_cache, case.v_cache, *tables, max_query_len=2048, out=out, config=config)
        want = reference.paged_prefill(exact.q, exact.k_cache, exact.v_cache, *tables, max_query_len=2048)
        yield f"hopper {heads}/{kv_heads} page{size} {dtype} {config}", paged_case.relative_error(out, want)
    yield from gpu_check_attention.check_hopper()
    yield from gpu_check_attention.check_hopper_bytes()
    yield from gpu_check_attention.check_latent_hopper()


FEW_ROWS_PRODUCTS = ((28672, 4096), (6144, 14336), (960, 576), (336, 192))


def check_few_rows(products: tuple[tuple[int, int], ...] = FEW_ROWS_PRODUCTS) -> Iterator[tuple[str, float]]:
    """products: (columns, depth)."""
    from pagecast_kernels import few_rows, few_rows_hopper

    for rows, (columns, depth) in itertools.product((2, 33, 64, 65, 128), products):
        x, residual = torch.randn(rows, depth, device="cuda").bfloat16(), torch.randn(rows, columns, device="cuda").bfloat16()
        weight = (torch.randn(columns, depth, device="cuda") * depth**-0.5).bfloat16()
        want = reference.linear(x.double(), weight.double())
        for turn, add in itertools.product((0, few_rows.TURN), (False, True)):
            out = residual.clone() if add else torch.full_like(residual, float("nan"))
            few_rows_hopper.launch(x, weight, out, few_rows.FewRows(turn), add)
            name = f"few_rows {rows} x {columns} x {depth} turn {turn}{' add' * add}"
            yield name, paged_case.relative_error(out, want + residual.double() if add else want)
        scratch, loud = few_rows.scratch(torch.device("cuda")), 3.0 * x
        for turn, eps in itertools.product((0, few_rows.TURN), (None, 1e-5)):
            first, out = (torch.full((rows, columns // 2), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
            for result in (first, out):
                few_rows_hopper.launch_gated(loud, weight, result, eps, few_rows.FewRows(turn), scratch)
            if scratch.counters.any() or not torch.equal(first, out):
                out.fill_(float("nan"))
            name = f"few_rows {rows} x {columns} x {depth} turn {turn} gated{' scaled' * (eps is not None)}"
            yield name, paged_case.relative_error(out, reference.linear_silu_mul(loud.double(), weight.double(), eps))


# --- numbers ---------------------------------------------------------------------------------------------------------------------


def check_shapes() -> Iterator[tuple[tuple[int, int, int, int], torch.dtype, tuple[tuple[str, float], ...]]]:
    """(heads, KV heads, head size, block size), dtype, options."""
    shapes = [(32, 8, 128, 16), (8, 8, 64, 16), (9, 3, 64, 32), (8, 1, 128, 64), (8, 2, 96, 16), (4, 2, 256, 16), (8, 2, 128, 128)]
    for shape in shapes:
        yield shape, torch.bfloat16, ()
    for options in ((), (("window", 100),), (("softcap", 20.0),)):
        yield shapes[0], torch.float16, options


def check_decode() -> Iterator[tuple[str, float]]:
    for (heads, kv_heads, dim, size), dtype, options in check_shapes():
        case = paged_case.make(dim + heads, CHECK_LENS, [1] * len(CHECK_LENS), heads, kv_heads, dim, size, dtype, "cuda")
        exact = case.to(torch.float64)
        tables = (case.block_table, case.rows, case.seq_lens, dim**-0.5)
        out = torch.full_like(case.q, float("nan"))
        decode.paged_decode(case.q, case.k_cache, case.v_cache, *tables, out=out, **dict(options))
        want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, **dict(options))
        yield f"decode {heads}/{kv_heads} d{dim} page{size} {dtype} {options}", paged_case.relative_error(out, want)


def check_prefill() -> Iterator[tuple[str, float]]:
    lens, query_lens = [list(x) for x in zip(*CHECK_CHUNKS)]
    for (heads, kv_heads, dim, size), dtype, options in check_shapes():
        case = paged_case.make(dim + heads, lens, query_lens, heads, kv_heads, dim, size, dtype, "cuda")
        exact = case.to(torch.float64)
        tables = (case.block_table, case.rows, case.starts, case.seq_lens, dim**-0.5)
        out = torch.full_like(case.q, float("nan"))
        prefill.paged_prefill(case.q, case.k_cache, case.v_cache, *tables, max_query_len=400, out=out, **dict(options))
        want = reference.paged_prefill(exact.q, exact.k_cache, exact.v_cache, *tables, max_query_len=400, **dict(options))
        yield f"prefill {heads}/{kv_heads} d{dim} page{size} {dtype} {options}", paged_case.relative_error(out, want)


def check_launches(quick: bool) -> Iterator[tuple[str, float]]:
    """Every candidate launch computes the same function."""
    lens = [900, 1, 0, 64, *range(300, 360)]
    case = paged_case.make(4, lens, [1] * 64, 32, 8, 128, 16, torch.bfloat16, "cuda")
    exact = case.to(torch.float64)
    tables = (case.block_table, case.rows, case.seq_lens, 0.09)
    want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables)
    for config in decode_launches(quick):
        for _ in range(2):
            out = torch.full_like(case.q, float("nan"))
            decode.paged_decode(case.q, case.k_cache, case.v_cache, *tables, out=out, config=config)
            yield f"decode {config}", paged_case.relative_error(out, want)
    lens, query_lens = [900, 5, 64, 333], [900, 1, 64, 100]
    case = paged_case.make(4, lens, query_lens, 32, 8, 128, 16, torch.bfloat16, "cuda")
    exact = case.to(torch.float64)
    tables = (case.block_table, case.rows, case.starts, case.seq_lens, 0.09)
    want = reference.paged_prefill(exact.q, exact.k_cache, exact.v_cache, *tables, max_query_len=900)
    for config in prefill_launches(quick):
        out = torch.full_like(case.q, float("nan"))
        prefill.paged_prefill(case.q, case.k_cache, case.v_cache, *tables, max_query_len=900, out=out, config=config)
        yield f"prefill {config}", paged_case.relative_error(out, want)


def check_small() -> Iterator[tuple[str, float]]:
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    residual, weight = torch.randn_like(x), torch.randn(4096, device="cuda").bfloat16()
    nan = lambda *shape: torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    got = norms.rms_norm(x, weight, 1e-5, nan(300, 4096))
    yield "rms_norm", paged_case.relative_error(got, reference.rms_norm(x.double(), weight, 1e-5))
    total = residual.double()
    want = reference.add_rms_norm(x.double(), total, weight, 1e-5)
    yield "add_rms_norm", paged_case.relative_error(norms.add_rms_norm(x, residual, weight, 1e-5, nan(300, 4096)), want)
    yield "add_rms_norm residual", paged_case.relative_error(residual, total)
    yield "silu_mul", paged_case.relative_error(elementwise.silu_mul(x, nan(300, 2048)), reference.silu_mul(x.double()))
    got = elementwise.silu_mul(x, nan(300, 2048), residual, 1e-5)
    yield "silu_mul scaled", paged_case.relative_error(got, reference.silu_mul(x.double(), residual=residual.double(), eps=1e-5))
    ids = torch.randint(0, 300, (500,), device="cuda")
    yield "embedding", paged_case.relative_error(elementwise.embedding(ids, x, out=nan(500, 4096)), x[ids])
    for heads, kv_heads, dim, norm in ((32, 8, 128, False), (9, 3, 64, False), (16, 8, 128, True), (8, 8, 96, True)):
        qkv = torch.randn(77, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
        angle = torch.randn(512, dim // 2, device="cuda")
        cos_sin, positions = torch.cat((angle.cos(), angle.sin()), 1), torch.randint(0, 512, (77,), device="cuda").int()
        slots = torch.randperm(160, device="cuda")[:77]
        slots[5] = -1
        weights = (weight[:dim], weight[dim : 2 * dim]) if norm else (None, None)
        late = {"residual": residual[:77], "bias": qkv[0].clone()}
        for name, scaled in (("", {}), (" scaled", late)):
            caches = [torch.zeros(10, kv_heads, 16, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            exact, args = [c.double() for c in caches], (heads, kv_heads, dim, *weights)
            got = rope.rope_and_write_kv(qkv, cos_sin, positions, slots, *caches, *args, out_q=nan(77, heads, dim), **scaled)
            wide = {key: value.double() for key, value in scaled.items()}
            want = reference.rope_and_write_kv(qkv.double(), cos_sin, positions, slots, *exact, *args, **wide)
            pairs = ((got, want), (caches[0], exact[0]), (caches[1], exact[1]))
            yield f"rope_and_write_kv{name} {heads}/{kv_heads} d{dim} norm {norm}", max(paged_case.relative_error(a, b) for a, b in pairs)


def check_one_row(device: str = "cuda", depth: int = 4096) -> Iterator[tuple[str, float]]:
    """Products of one row, and what they do in passing: heads are rounded before they are rotated, and again."""
    normal = lambda *shape: torch.randn(*shape, device=device).bfloat16()
    x, gamma, heads, kv_heads, dim = normal(1, depth), normal(depth), 8, 2, 128
    weight, bias = normal((heads + 2 * kv_heads) * dim, depth), normal((heads + 2 * kv_heads) * dim)
    exact, wide = weight.double(), x.double()
    nan = lambda columns: torch.full((1, columns), float("nan"), dtype=torch.bfloat16, device=device)
    yield "gemv", paged_case.relative_error(gemv.gemv(x, weight, bias, nan(len(weight))), reference.linear(wide, exact, bias.double()))
    got = gemv.norm_gemv_silu_mul(x, gamma, 1e-5, weight, nan(len(weight) // 2))
    yield "norm_gemv_silu_mul", paged_case.relative_error(got, reference.norm_linear_silu_mul(wide, gamma, 1e-5, exact))
    total = normal(1, len(weight))
    want = reference.linear_add(wide, exact, total.double())
    yield "gemv_add", paged_case.relative_error(gemv.gemv_add(x, weight, total), want)
    cos_sin, position = torch.randn(8, dim, device=device), torch.tensor([5], dtype=torch.int32, device=device)
    for slot in (37, -1):
        at = torch.tensor([slot], device=device)
        caches = [torch.zeros(4, kv_heads, 16, dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
        held = [cache.double() for cache in caches]
        got = gemv.norm_gemv_heads(x, gamma, 1e-5, weight, Heads(cos_sin, position, at, *caches, heads), bias)
        qkv = reference.norm_linear(wide, gamma, 1e-5, exact, bias.double())
        want = reference.rope_and_write_kv(qkv, cos_sin.double(), position, at, *held, heads, kv_heads, dim)
        pairs = ((got, want), *zip(caches, held))
        yield f"norm_gemv_heads slot {slot}", max(paged_case.relative_error(a, b) for a, b in pairs)


def check_sampling() -> Iterator[tuple[str, float]]:
    """The share of rows that differ from the twin; rounding at the nucleus' edge, and of logarithms, may move one in hundreds."""
    batch = 64
    index = torch.arange(batch, dtype=torch.int32, device="cuda")
    for vocab, dtype in itertools.product(*CHECK_SAMPLES):
        logits = (torch.randn(batch, vocab, device="cuda") * 2).to(dtype)
        for name, (limits, _) in SAMPLING.items():
            full = lambda key, value, kind, limits=limits: torch.full((batch,), limits.get(key, value), dtype=kind, device="cuda")
            columns = [full("temperature", 1.0, torch.float32), full("top_k", 0, torch.int32), full("top_p", 1.0, torch.float32)]
            args = (logits, *columns, full("min_p", 0.0, torch.float32), index.long() * 987654321987, index, index)
            got = sampling.sample(*args, out=torch.full_like(index, -7))
            yield f"sample {name} {vocab} {dtype}", float((got != reference.sample(*args)).float().mean())
    got, want = logprobs.top_logprobs(logits, index, 5), reference.top_logprobs(logits, index, 5)
    yield "top_logprobs", max(paged_case.relative_error(a, b) for a, b in zip(got, want))


def report(sources: list[tuple[Iterator[tuple[str, float]], float]]) -> int:
    """Print what is wrong and the worst of each kind; returns how many are wrong."""
    worst: dict[str, tuple[float, str]] = {}
    wrong, count = 0, 0
    for source, limit in sources:
        for name, error in source:
            count += 1
            if not error <= limit:
                wrong += 1
                print(f"WRONG {name}: {error:.3g}", flush=True)
            kind = name.split()[0]
            worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))
    print(f"{count} checks, {wrong} wrong; worst:", *(f"{error:.2e} {name}" for error, name in worst.values()), sep="\n  ", flush=True)
    return wrong


def check(quick: bool) -> int:
    attention = [(check_decode(), 8e-3), (check_prefill(), 8e-3), (check_launches(quick), 8e-3), (gpu_check_attention.check_all(), 8e-3)]
    return report([*attention, (check_small(), 6e-3), (check_one_row(), 8e-3), (check_sampling(), 0.04)])


# --- speed -------------------------------------------------------------------------------------------------------------------------


def measure_attention(
    name: str, case: bench_cases.Attention, pool: bench_cases.Pool, anchors: dict[str, float], launches: list[Any],
    ours: Callable[[Any], list[bench_cases.Launch]],
) -> dict[str, Any]:  # fmt: skip
    timed = bench_cases.alternate({"ours": ours(None)} | bench_cases.flash3_launches(case, pool))
    tried = {}
    for config in launches:
        try:
            tried[config] = bench_cases.graph_us(ours(config), 1000.0, 3)
        except Exception as error:
            print(f"  {config}: {type(error).__name__} {str(error)[:80]}", flush=True)
    peer = {key: value for key, value in timed.items() if key != "ours"}
    if anchors:
        peer |= {"anchor_fa3": anchors["fa3"]}
    row = bench_cases.as_row(name, timed["ours"], case, peer)
    best = min(tried, key=tried.__getitem__) if tried else None
    row |= {"peers_us": peer, "tried": {str(k): round(v, 2) for k, v in tried.items()}, "best_us": tried.get(best), "best": str(best)}
    short = {k: v for k, v in row.items() if k not in ("tried", "peers_us")}
    print(f"{name:12}", *(f"{k} {v}" for k, v in short.items() if k != "name"), {k: round(v, 1) for k, v in peer.items()}, flush=True)
    ordered = sorted(tried.items(), key=lambda item: item[1])
    print("    ", *("/".join(str(x) for x in vars(config).values()) + f"={us:.1f}" for config, us in ordered), flush=True)
    return row


def small_cases(tokens: int) -> dict[str, tuple[list[bench_cases.Launch], int]]:
    """Launches of the small kernels over rotating inputs, and how many elements each moves per token."""
    sets = max(min((256 << 20) // (tokens * 28672 * 2), 40), 1)
    bf16 = lambda *shape: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    x, gate_up, qkv = ([bf16(tokens, width) for _ in range(sets)] for width in (4096, 28672, 6144))
    weight, residual, out, out_i, q = bf16(4096), bf16(tokens, 4096), bf16(tokens, 4096), bf16(tokens, 14336), bf16(tokens, 32, 128)
    cache, cos_sin = bf16(tokens // 16 + 1, 8, 16, 128), torch.randn(8192, 128, device="cuda")
    slots = torch.arange(tokens, device="cuda")
    rope_args = (cos_sin, slots.int(), slots, cache, cache, 32, 8, 128)
    return {
        "rms_norm": ([lambda x=x: norms.rms_norm(x, weight, 1e-5, out) for x in x], 2 * 4096),
        "add_rms_norm": ([lambda x=x: norms.add_rms_norm(x, residual, weight, 1e-5, out) for x in x], 4 * 4096),
        "silu_mul": ([lambda x=x: elementwise.silu_mul(x, out_i) for x in gate_up], 28672 + 14336),
        "rope_and_write_kv": ([lambda x=x: rope.rope_and_write_kv(x, *rope_args, out_q=q) for x in qkv], 2 * 6144),
    }


def measure_small() -> Iterator[dict[str, Any]]:
    for tokens in (1, 256, 8192):
        for name, (launches, elements) in small_cases(tokens).items():
            us = bench_cases.graph_us(launches, 500.0, 3)
            yield {"name": f"{name} {tokens}", "us": round(us, 2), "tb_s": round(tokens * elements * 2 / us / 1e6, 3)}


def measure_mixed(pool: bench_cases.Pool, anchor: float) -> dict[str, Any]:
    """64 decodes at 1,024 tokens and one prompt of 2,048, as two launches."""
    both = bench_cases.mixed(pool, [1024] * 64, [2048])
    case = bench_cases.attention(pool, [1024] * 64 + [2048], [1] * 64 + [2048])
    timed = bench_cases.alternate({"ours": both} | bench_cases.flash3_launches(case, pool))
    return bench_cases.as_row("mixed", timed["ours"], case, {k: v for k, v in timed.items() if k != "ours"} | {"anchor_fa3": anchor})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="check,decode,prefill,mixed,sample,small")
    parser.add_argument("--quick", action="store_true", help="only the launch table's own choices")
    args = parser.parse_args()
    parts, begin = set(args.parts.split(",")), time.perf_counter()
    if parts == {"hopper"}:
        return report([(check_hopper(), 8e-3), (check_few_rows(), 8e-3)])
    compile_ahead(parts, args.quick)
    anchors = json.loads(ANCHORS.read_text())["kernels_us"]
    rows: list[dict[str, Any]] = []
    wrong = check(args.quick) if "check" in parts else 0
    print(f"[{time.perf_counter() - begin:.0f} s]", flush=True)
    pool = bench_cases.Pool.make(66_000) if parts & {"decode", "prefill", "mixed"} else None
    if "decode" in parts:
        for name, lens in (DECODE | RAGGED).items():
            case = bench_cases.attention(pool, lens)
            work = decode.decode_workspace(len(lens), 32, 8, 128, "cuda")
            ours = lambda config, case=case, work=work: case.decode(pool, config, work)
            rows.append(measure_attention(name, case, pool, anchors["decode"].get(name, {}), decode_launches(args.quick), ours))
    print(f"[{time.perf_counter() - begin:.0f} s]", flush=True)
    if "prefill" in parts:
        for name, lens in PREFILL.items():
            case = bench_cases.attention(pool, lens, lens)
            ours = lambda config, case=case: case.prefill(pool, config)
            rows.append(measure_attention("prefill " + name, case, pool, anchors["prefill"][name], prefill_launches(args.quick), ours))
    if "mixed" in parts:
        rows.append(measure_mixed(pool, anchors["mixed_64x1024_plus_2048"]["fa3"]))
        print(rows[-1], flush=True)
    print(f"[{time.perf_counter() - begin:.0f} s]", flush=True)
    if "sample" in parts:
        for batch, (name, (limits, filtered)) in itertools.product((256, 1), SAMPLING.items()):
            us = bench_cases.graph_us(bench_cases.sampling_launches(batch, 128256, limits, filtered), 1000.0, 3)
            rows.append({"name": f"sample {batch}x128256 {name}", "us": round(us, 1)})
            print(rows[-1], flush=True)
    if "small" in parts:
        for row in measure_small():
            rows.append(row)
            print(row, flush=True)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu_check.json").write_text(json.dumps(rows, indent=1))
    print(f"total {time.perf_counter() - begin:.0f} s; {wrong} checks wrong", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
