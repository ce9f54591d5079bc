"""Numbers of the attention kernels that gpu_check.py does not launch: over a list of tiles, a shared prefix, latents.

Outputs are poisoned with NaN before each check.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from ops import paged_case

from pagecast_kernels import configs, decode_flat, decode_hopper, decode_hopper_bytes, latent, prefill, reference, shared_prefix

LENS = [1, 15, 16, 17, 0, 63, 64, 65, 700, 3000, 129]
CHUNKS = [(1, 1), (17, 17), (640, 5), (333, 333), (0, 0), (1000, 400), (33, 32)]  # (seq_len, query_len)
FLAT = (((32, 8, 128, 16), 0.0), ((9, 3, 64, 32), 0.0), ((8, 2, 96, 16), 20.0), ((8, 1, 128, 128), 0.0))  # shape, soft-cap
BYTES = (
    (32, 8, 16, torch.bfloat16), (32, 8, 32, torch.float16), (8, 8, 16, torch.bfloat16), (12, 4, 64, torch.bfloat16),
    (16, 1, 128, torch.float16), (10, 2, 16, torch.bfloat16),
)  # fmt: skip
"""Heads, KV heads, block size and type of q, over a cache of e4m3."""
Errors = Iterator[tuple[str, float]]


def check_flat(device: str = "cuda", lens: list[int] = LENS) -> Errors:
    """Twice with one workspace each: its counters must be zero again."""
    for (heads, kv_heads, dim, size), softcap in FLAT:
        for seq_lens in (lens[-1:], lens, 6 * lens):  # with 8 KV heads each is launched another way
            count = len(seq_lens)
            case = paged_case.make(dim + heads, seq_lens, [1] * count, heads, kv_heads, dim, size, torch.bfloat16, device)
            exact, tables = case.to(torch.float64), (case.block_table, case.rows, case.seq_lens, dim**-0.5)
            want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, softcap=softcap)
            work = decode_flat.step_workspace(count, heads, kv_heads, dim, device)
            for call in ("first", "second"):
                out = torch.full_like(case.q, float("nan"))
                decode_flat.paged_decode(case.q, case.k_cache, case.v_cache, *tables, softcap=softcap, workspace=work, out=out)
                yield f"flat {heads}/{kv_heads} d{dim} page{size} x{count} {call} call", paged_case.relative_error(out, want)
            yield f"flat {heads}/{kv_heads} d{dim} counters", float(work.scratch.counters.any())


def check_hopper(device: str = "cuda", lens: list[int] = LENS) -> Errors:
    """Decode with a warp that fetches: launches of every kind, thrice with one workspace, then two of which one begins early."""
    many = [*lens, *range(1, 200, 7), *[218] * 40]
    for heads, kv_heads, dim, size, dtype in (
        (32, 8, 128, 16, torch.bfloat16), (32, 8, 128, 16, torch.float16), (16, 1, 128, 16, torch.bfloat16), (8, 8, 128, 8, torch.bfloat16),
        (12, 4, 128, 64, torch.bfloat16), (10, 2, 128, 128, torch.bfloat16), (9, 3, 64, 16, torch.bfloat16),
        (16, 1, 64, 128, torch.float16), (12, 3, 128, 32, torch.bfloat16),
    ):  # fmt: skip
        counts = (1, configs.FEW_PAIRS // kv_heads, configs.MANY_PAIRS)
        made_for = dict.fromkeys(configs.decode_hopper(n, kv_heads, heads // kv_heads, dim, size, device) for n in counts)
        for config, seq_lens in itertools.product(filter(None, made_for), ([3], lens, many, [9000], [0, 0])):
            count = len(seq_lens)
            name = f"decode_hopper @{config.programs} {heads}/{kv_heads} d{dim} page{size} x{count}"
            case = paged_case.make(heads, seq_lens, [1] * count, heads, kv_heads, dim, size, dtype, device)
            exact, tables = case.to(torch.float64), (case.block_table, case.rows, case.seq_lens)
            want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables, 0.09)
            work = decode_flat.step_workspace(count, heads, kv_heads, dim, device)
            tiles = work.tiles.of(*tables, size, config.tile)
            args = (case.q, case.k_cache, case.v_cache, case.seq_lens, 0.09, tiles, work.scratch)
            for call in range(4):
                outs = [torch.full_like(case.q, float("nan")) for _ in range(2 if call == 3 else 1)]
                for out in outs:
                    decode_hopper.launch(*args, out, config, call == 3)
                yield f"{name} call {call}", max(paged_case.relative_error(out, want) for out in outs)
            yield f"{name} counters", float(work.scratch.counters.any())


def check_hopper_bytes(
    device: str = "cuda", lens: list[int] = LENS, shapes: tuple[tuple[int, int, int, torch.dtype], ...] = BYTES,
    launches: tuple[configs.HopperDecode, ...] = (),
) -> Errors:  # fmt: skip
    """The same over a cache of e4m3, by the table's launches or others: thrice with one workspace, then in a graph, where the second of
    two begins early."""
    many, edges = [*lens, *range(1, 200, 7), *[218] * 40], [127, 128, 129, 0, 255, 256, 257, 31, 32, 33]
    for heads, kv_heads, size, dtype in shapes:
        made_for = (decode_hopper_bytes.config_for(n, kv_heads, heads // kv_heads, device) for n in (1, configs.MANY_PAIRS))
        tried = launches or tuple(filter(None, made_for))
        for seq_lens in ([3], lens, edges, many, [9000], [0, 0]):
            count = len(seq_lens)
            case = paged_case.make(heads, seq_lens, [1] * count, heads, kv_heads, 128, size, dtype, device)
            caches = [cache.to(torch.float8_e4m3fn) for cache in (case.k_cache, case.v_cache)]
            scales = [torch.rand(kv_heads, device=device) + 0.5 for _ in caches]
            tables = (case.block_table, case.rows, case.seq_lens)
            want = reference.paged_decode(case.q.double(), *caches, *tables, 0.09, k_scale=scales[0], v_scale=scales[1])
            work = decode_flat.step_workspace(count, heads, kv_heads, 128, device)
            for config in tried:
                work.scratch.parts.fill_(float("nan"))
                work.scratch.stats.fill_(float("nan"))
                out, tiles = torch.empty_like(case.q), work.tiles.of(*tables, size, config.tile)
                args = (case.q, *caches, case.seq_lens, 0.09, *scales, tiles, work.scratch, out, config)
                name = f"decode_hopper e4m3 {heads}/{kv_heads} page{size} x{count} longest {max(seq_lens)} {config}"
                for call in range(3):
                    out.fill_(float("nan"))
                    decode_hopper_bytes.launch(*args)
                    yield f"{name} call {call}", paged_case.relative_error(out, want)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    decode_hopper_bytes.launch(*args)
                    decode_hopper_bytes.launch(*args, True)
                for _ in range(3):
                    out.fill_(float("nan"))
                    graph.replay()
                yield f"{name} replayed", paged_case.relative_error(out, want)
                yield f"{name} counters", float(work.scratch.counters.any())


def check_shared(device: str = "cuda", prefix: int = 128) -> Errors:
    """Two thirds of the sequences begin with the same blocks, in more items than one where they are many."""
    for heads, kv_heads, dim, count in ((32, 8, 128, 75), (9, 3, 64, 6), (4, 2, 256, 7)):
        lens = [prefix + n % 70 if n % 3 else 5 + n for n in range(count)]
        case = paged_case.make(dim, lens, [1] * count, heads, kv_heads, dim, 16, torch.bfloat16, device)
        members = [n for n in range(count) if n % 3 and lens[n] > prefix]
        as_ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        first = case.rows[members].long()
        case.block_table[first, : prefix // 16] = case.block_table[first[0], : prefix // 16].clone()
        most, places = shared_prefix.seqs_per_item(heads, kv_heads), shared_prefix.max_items(count, heads, kv_heads)
        items = [(n, min(most, len(members) - n), prefix, int(first[0])) for n in range(0, len(members), most)]
        skip = [prefix if n in members else 0 for n in range(count)]
        shared = shared_prefix.SharedPrefixes(
            as_ints(skip), as_ints(members + [0] * (count - len(members))), as_ints(items + [(0, 0, 0, 0)] * (places - len(items)))
        )  # fmt: skip
        exact, tables = case.to(torch.float64), (case.block_table, case.rows, case.seq_lens, dim**-0.5)
        out = torch.full_like(case.q, float("nan"))
        shared_prefix.paged_decode_shared(case.q, case.k_cache, case.v_cache, *tables, shared, out=out)
        want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, *tables)
        yield f"shared {heads}/{kv_heads} d{dim} x{count}", paged_case.relative_error(out, want)


def check_latent(
    device: str = "cuda", rank: int = 512, rope: int = 64, lens: list[int] = LENS, heads: tuple[int, ...] = (16, 128)
) -> Errors:
    """DeepSeek's latents, in groups of heads where these are many."""
    for count in heads:
        for kind, chunks in (("decode", [(n, 1) for n in lens]), ("prefill", [(n, min(q, n)) for n, q in CHUNKS if n <= max(lens)])):
            seq_lens, query_lens = [list(x) for x in zip(*chunks)]
            case = paged_case.make(count, seq_lens, query_lens, count, 1, rank + rope, 16, torch.bfloat16, device)
            cut = lambda x, a, b: x[..., a:b].contiguous()
            q, caches = (cut(case.q, 0, rank), cut(case.q, rank, rank + rope)), (cut(case.k_cache, 0, rope), cut(case.v_cache, 0, rank))
            tables, out = (case.block_table, case.rows), torch.full_like(q[0], float("nan"))
            wide = [x.double() for x in (*q, *caches)]
            if kind == "decode":
                config = configs.latent_decode(min(count, configs.LATENT_DECODE_HEADS), device)  # not Hopper's
                latent.latent_decode(*q, *caches, *tables, case.seq_lens, 0.05, out=out, config=config)
                want = reference.latent_decode(*wide, *tables, case.seq_lens, 0.05)
            else:
                last = (case.starts, case.seq_lens, 0.05)
                latent.latent_prefill(*q, *caches, *tables, *last, max_query_len=max(query_lens), out=out)
                want = reference.latent_prefill(*wide, *tables, *last, max_query_len=max(query_lens))
            yield f"latent {kind} h{count}", paged_case.relative_error(out, want)


def check_latent_hopper(device: str = "cuda", lens: list[int] = LENS) -> Errors:
    """Decode over latents with a warp that fetches, which latent_decode chooses for these: thrice with one workspace, then in a graph.

    Sequences that leave from one part to one for each program, and programs that leave parts of two; parts hold NaN before they are left.
    """
    many = [*lens, *range(1, 200, 7), *[218] * 40]
    long = ([64 * n] for n in (1, 2, 7, 127, 128, 129, 132, 200))
    cut = ([0, *[77] * 30, 20000, *[100] * 31, 0], [9000, 20000, 0, 1, 7000, 64], [0, 0], [700] * 6, *long)
    for heads, size, dtype, others in (
        (16, 16, torch.bfloat16, cut), (16, 8, torch.float16, ()), (12, 64, torch.bfloat16, cut[:2]), (5, 128, torch.bfloat16, cut[1:2]),
        (1, 32, torch.bfloat16, cut[:1]),
    ):  # fmt: skip
        for seq_lens in ([3], lens, many, [9000], *others):
            case = paged_case.make(heads, seq_lens, [1] * len(seq_lens), heads, 1, 576, size, dtype, device)
            parts = (case.q[..., :512], case.q[..., 512:], case.k_cache[..., :64], case.v_cache[..., :512])
            args, tables = tuple(x.contiguous() for x in parts), (case.block_table, case.rows, case.seq_lens)
            want = reference.latent_decode(*(x.double() for x in args), *tables, 0.05)
            work = latent.latent_workspace(len(seq_lens), heads, 512, device)
            work.scratch.parts.fill_(float("nan"))
            work.scratch.stats.fill_(float("nan"))
            for configured in {configs.latent_hopper(n, device) for n in (1, len(seq_lens), 64)}:
                name = f"latent hopper h{heads} page{size} x{len(seq_lens)} longest {max(seq_lens)} team {configured.team}"
                out = torch.empty_like(args[0])
                launch = functools.partial(
                    latent.latent_decode, *args, *tables, 0.05, workspace=work, out=out, config=configured
                )  # fmt: skip
                for call in range(3):
                    out.fill_(float("nan"))
                    launch()
                    yield f"{name} call {call}", paged_case.relative_error(out, want)
                if others is cut and configured == configs.latent_hopper(len(seq_lens), device):
                    first, graph = out.clone(), torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        launch()
                    for _ in range(3):
                        out.fill_(float("nan"))
                        graph.replay()
                    yield f"{name} replayed", paged_case.relative_error(out, want)
                    yield f"{name} whoever comes last", float((out != first).any())
                yield f"{name} counters", float(work.scratch.counters.any() | work.scratch.teams.any())


def check_far(device: str = "cuda", blocks: int = 140_000) -> Errors:
    """Blocks that begin past 2³¹ values of their cache. Takes 9.2 GB."""
    lens, query_lens = [70, 300], [70, 40]
    for kind, queries in (("flat", [1, 1]), ("prefill", query_lens)):
        case = paged_case.make(7, lens, queries, 32, 8, 128, 16, torch.bfloat16, device)
        held = case.k_cache.shape[0]
        k_cache, v_cache = (torch.empty((blocks, 8, 16, 128), dtype=torch.bfloat16, device=device) for _ in range(2))
        k_cache[-held:], v_cache[-held:] = case.k_cache, case.v_cache
        exact, scale = case.to(torch.float64), 128**-0.5
        table, out = case.block_table + (blocks - held), torch.full_like(case.q, float("nan"))
        if kind == "flat":
            work = decode_flat.step_workspace(len(lens), 32, 8, 128, device)
            decode_flat.paged_decode(case.q, k_cache, v_cache, table, case.rows, case.seq_lens, scale, workspace=work, out=out)
            want = reference.paged_decode(exact.q, exact.k_cache, exact.v_cache, case.block_table, case.rows, case.seq_lens, scale)
        else:
            last = (case.rows, case.starts, case.seq_lens, scale)
            prefill.paged_prefill(case.q, k_cache, v_cache, table, *last, max_query_len=max(queries), out=out)
            want = reference.paged_prefill(exact.q, exact.k_cache, exact.v_cache, case.block_table, *last, max_query_len=max(queries))
        yield f"far {kind}", paged_case.relative_error(out, want)


def check_places_left(device: str = "cuda") -> Errors:
    """Padding of length -1 is left as it is: 1 where a place is not; and the error of the others, zeros for length 0 among them."""
    for heads, kv_heads, dim, kind in ((32, 8, 128, None), (64, 4, 64, None), (32, 8, 128, torch.float8_e4m3fn), (16, 8, 256, None)):
        for count in (6, 60):
            lens = [300, 0, 17, 0, 1, 900] * (count // 6)
            case = paged_case.make(heads, lens, [1] * count, heads, kv_heads, dim, 16, torch.bfloat16, device)
            caches = (case.k_cache, case.v_cache) if kind is None else (case.k_cache.to(kind), case.v_cache.to(kind))
            one = torch.ones(kv_heads, device=device)
            looks = {} if kind is None else {"k_scale": one, "v_scale": one}
            tables = (case.block_table, case.rows, case.seq_lens, 0.09)
            work = decode_flat.step_workspace(count, heads, kv_heads, dim, device)
            want = reference.paged_decode(case.q.double(), *(cache.double() for cache in caches), *tables)
            left = [n for n in range(count) if n % 6 == 3]
            rest = [n for n in range(count) if n % 6 != 3]
            case.seq_lens[left] = -1
            out = torch.full_like(case.q, 7.0)
            decode_flat.paged_decode(case.q, *caches, *tables, workspace=work, out=out, **looks)
            name = f"places {heads}/{kv_heads} d{dim} {kind} x{count}"
            yield f"{name} left", float((out[left] != 7.0).any())
            yield name, paged_case.relative_error(out[rest], want[rest])


def check_all() -> Errors:
    for check in (check_flat, check_shared, check_latent, check_far, check_places_left):
        yield from check()
