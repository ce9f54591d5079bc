"""What `pagecast bench kernels` and kernels/gpu_check.py measure: inputs of each operator, and a stopwatch over CUDA graphs.

A case is a list of launches over different inputs, together larger than the L2 cache, so that none finds its data there.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels import configs, decode, decode_flat, prefill, sampling
from pagecast_kernels import shared_prefix as shared_prefix_ops

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
ROTATE_BYTES = 256 << 20
READ_TB_S, BF16_TFLOP_S = 4.55, 790.0  # ceilings measured on an H200
Launch = Callable[[], object]


def has_gpu() -> bool:
    """Whether there is a GPU that torch can use; without one nothing here can be measured."""
    return torch.cuda.is_available()


@dataclass(frozen=True)
class Pool:
    """A KV pool shared by all attention cases, and an order in which to hand out its blocks."""

    k: Tensor
    v: Tensor
    order: Tensor

    @staticmethod
    def make(blocks: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> "Pool":
        """`blocks` blocks of random KV, none of them zeros, which would flatter the chip."""
        shape = (blocks, KV_HEADS, BLOCK_SIZE, DIM)
        k, v = (torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(2))
        return Pool(k, v, torch.randperm(blocks, device=device).to(torch.int32))


@dataclass(frozen=True)
class Attention:
    """Sequences of lens tokens with their last query_lens as queries, in as many sets as the rotation needs."""

    q: list[Tensor]
    tables: list[Tensor]
    rows: Tensor
    starts: Tensor
    lens: Tensor
    longest: int
    kv_bytes: int
    flops: int

    def decode(self, pool: Pool, config: configs.Decode | None = None, workspace: decode.DecodeWorkspace | None = None) -> list[Launch]:
        """Launches of what serving uses, the list of tiles being there already as it is for all layers but the first; with a config of
        decode.paged_decode."""
        outs = [torch.empty_like(q) for q in self.q]
        work = workspace or decode.decode_workspace(len(self.lens), HEADS, KV_HEADS, DIM, pool.k.device)
        if config is None:
            steps = [decode_flat.StepWorkspace(work, decode_flat.StepTiles(len(self.lens))) for _ in self.tables]
            return [
                lambda q=q, t=t, out=out, step=step: decode_flat.paged_decode(
                    q, pool.k, pool.v, t, self.rows, self.lens, DIM**-0.5, workspace=step, out=out
                )
                for q, t, out, step in zip(self.q, self.tables, outs, steps)
            ]  # fmt: skip
        return [
            lambda q=q, t=t, out=out: decode.paged_decode(
                q, pool.k, pool.v, t, self.rows, self.lens, DIM**-0.5, workspace=work, out=out, config=config
            )
            for q, t, out in zip(self.q, self.tables, outs)
        ]  # fmt: skip

    def prefill(self, pool: Pool, config: configs.Prefill | None = None) -> list[Launch]:
        """Launches of paged_prefill."""
        outs = [torch.empty_like(q) for q in self.q]
        return [
            lambda q=q, t=t, out=out: prefill.paged_prefill(
                q, pool.k, pool.v, t, self.rows, self.starts, self.lens, DIM**-0.5, max_query_len=self.longest, out=out, config=config
            )
            for q, t, out in zip(self.q, self.tables, outs)
        ]  # fmt: skip

    def flash3(self, pool: Pool, planned: bool) -> list[Launch]:
        """The same through FlashAttention 3 as vLLM packs it. Raises ImportError where it is not installed.

        planned: with the launch plan made before, as vLLM does once per step.
        """
        from vllm.vllm_flash_attn import flash_attn_interface as fa3

        k, v = (cache.view(-1, BLOCK_SIZE, KV_HEADS, DIM) for cache in (pool.k, pool.v))
        longest = int(self.lens.max())
        plan = None
        if planned:
            plan = fa3.get_scheduler_metadata(
                len(self.lens), self.longest, longest, HEADS, KV_HEADS, DIM, self.lens, cu_seqlens_q=self.starts,
                page_size=BLOCK_SIZE, causal=True,
            )  # fmt: skip
        outs = [torch.empty_like(q) for q in self.q]
        return [
            lambda q=q, t=t, out=out: fa3.flash_attn_varlen_func(
                q, k, v, self.longest, self.starts, longest, seqused_k=self.lens, softmax_scale=DIM**-0.5, causal=True, block_table=t,
                out=out, scheduler_metadata=plan, fa_version=3,
            )
            for q, t, out in zip(self.q, self.tables, outs)
        ]  # fmt: skip


def attention(pool: Pool, lens: list[int], query_lens: list[int] | None = None) -> Attention:
    """A case over the pool's blocks; query_lens defaults to one per sequence."""
    query_lens = query_lens or [1] * len(lens)
    device, dtype = pool.k.device, pool.k.dtype
    needed = [-(-n // BLOCK_SIZE) for n in lens]
    kv_bytes = sum(lens) * KV_HEADS * DIM * 2 * dtype.itemsize
    total = sum(needed)
    sets = max(min(-(-ROTATE_BYTES // kv_bytes), len(pool.order) // total, 64), 1)
    tables, width = [], -(-max(needed) // 16) * 16
    lengths = torch.tensor(needed, device=device).unsqueeze(1)
    place = torch.arange(width, device=device).unsqueeze(0)
    start = (lengths.cumsum(0) - lengths) + place
    for i in range(sets):
        own = pool.order[i * total : (i + 1) * total]
        tables.append(own[start.clamp(max=total - 1)].where(place < lengths, 0).contiguous())
    tokens = sum(query_lens)
    q = [torch.randn((tokens, HEADS, DIM), dtype=dtype, device=device) for _ in range(sets)]
    pairs = sum(n * c + n * (n + 1) // 2 for n, c in ((n, s - n) for s, n in zip(lens, query_lens)))
    return Attention(
        q, tables, torch.arange(len(lens), dtype=torch.int32, device=device),
        torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device), max(query_lens), kv_bytes, 4 * pairs * HEADS * DIM,
    )  # fmt: skip


def ragged(count: int, mean: float = 1024.0, sigma: float = 0.8, seed: int = 0) -> list[int]:
    """Log-normal lengths with the given mean, as chats have."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=g)
    return [max(int(n), 1) for n in torch.exp(normal * sigma + math.log(mean) - sigma**2 / 2).tolist()]


def shared_prefix(pool: Pool, count: int = 256, prefix: int = 2048, own: int = 64) -> dict[str, list[Launch]]:
    """Decodes of `count` sequences on one prefix, "plain" and with the prefix read once ("shared"). The plain one finds it in L2 often."""
    each, common = own // BLOCK_SIZE, prefix // BLOCK_SIZE
    width = -(-(common + each) // 16) * 16
    table = torch.zeros((count, width), dtype=torch.int32, device=pool.k.device)
    table[:, :common] = pool.order[:common]
    table[:, common : common + each] = pool.order[common : common + count * each].view(count, each)
    as_ints = partial(torch.tensor, dtype=torch.int32, device=pool.k.device)
    rows, lens = as_ints(range(count)), as_ints([prefix + own] * count)
    most = shared_prefix_ops.seqs_per_item(HEADS, KV_HEADS)
    items = [(first, min(most, count - first), prefix, 0) for first in range(0, count, most)]
    shared = shared_prefix_ops.SharedPrefixes(as_ints([prefix] * count), as_ints(range(count)), as_ints(items))
    q = [torch.randn((count, HEADS, DIM), dtype=pool.k.dtype, device=pool.k.device) for _ in range(4)]
    out, shape = torch.empty_like(q[0]), (count, HEADS, KV_HEADS, DIM, pool.k.device)
    plain, once = decode_flat.step_workspace(*shape), shared_prefix_ops.shared_workspace(*shape)
    tables = (pool.k, pool.v, table, rows, lens, DIM**-0.5)
    return {
        "plain": [lambda q=q: decode_flat.paged_decode(q, *tables, workspace=plain, out=out) for q in q],
        "shared": [lambda q=q: shared_prefix_ops.paged_decode_shared(q, *tables, shared, workspace=once, out=out) for q in q],
    }


def sampling_launches(batch: int, vocab: int, limits: dict[str, float], filtered: bool, device: str = "cuda") -> list[Launch]:
    """Launches of `sample` over logits of a network's spread; limits as in reference.sample."""
    sets = max(min(-(-ROTATE_BYTES // (batch * vocab * 2)), 8), 1)
    logits = [(torch.randn((batch, vocab), device=device) * 2).to(torch.bfloat16) for _ in range(sets)]
    index = torch.arange(batch, dtype=torch.int32, device=device)
    columns = [
        torch.full((batch,), limits.get(name, default), dtype=dtype, device=device)
        for name, default, dtype in (
            ("temperature", 1.0, torch.float32), ("top_k", 0, torch.int32), ("top_p", 1.0, torch.float32), ("min_p", 0.0, torch.float32),
        )
    ]  # fmt: skip
    work, out = sampling.sample_workspace(batch, device), torch.empty(batch, dtype=torch.int32, device=device)
    seeds = index.long() * 77777
    return [
        lambda x=x: sampling.sample(x, *columns, seeds, index, index, out=out, workspace=work, filtered=filtered) for x in logits
    ]


def captured(launches: list[Launch], least_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph that goes through all of them in turn until least_us are full, and the number of its launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which may still be making the inputs
    with torch.cuda.stream(side):
        for launch in launches:
            launch()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for launch in launches[:4]:
            launch()
        end.record()
    torch.cuda.synchronize()
    once = max(begin.elapsed_time(end) * 1e3 / len(launches[:4]), 2.0)
    rounds = max(min(int(least_us / once), 100) // len(launches), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    return graph, rounds * len(launches)


def graph_us(launches: list[Launch], least_us: float = 1500.0, repeats: int = 5) -> float:
    """Median microseconds a launch takes in a CUDA graph that goes through all of them in turn."""
    graph, count = captured(launches, least_us)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(repeats + 1):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(taken[1:])


def in_turn(cases: dict[Any, list[Launch]], rounds: int, least_us: float) -> dict[Any, float]:
    """Median microseconds of each case's launches, their graphs replayed one after the other without a pause, A-B-C-C-B-A: on a chip as hot
    as work makes it, and with what it loses to the heat spread over all."""
    graphs = {name: captured(launches, least_us) for name, launches in cases.items()}
    marks: dict[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name in reversed(graphs) if number % 2 else graphs:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name][0].replay()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in marks[name][1:]) * 1e3 / graphs[name][1] for name in cases
    }  # the first round warms up


def alternate(cases: dict[str, list[Launch]], rounds: int = 2) -> dict[str, float]:
    """Median microseconds of each of several cases, measured in turn (A-B-A-B)."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, launches in cases.items():
            taken[name].append(graph_us(launches))
    return {name: statistics.median(times) for name, times in taken.items()}


def flash3_launches(case: Attention, pool: Pool) -> dict[str, list[Launch]]:
    """FlashAttention 3 on the same inputs, with and without a launch plan made beforehand; empty where it cannot run."""
    found = {}
    for name, planned in (("fa3", False), ("fa3_planned", True)):
        try:
            launches = case.flash3(pool, planned)
            launches[0]()
        except Exception as error:
            print(f"  no {name}: {type(error).__name__} {str(error)[:100]}", flush=True)
        else:
            found[name] = launches
    return found


def sdpa_launches(case: Attention, pool: Pool) -> dict[str, list[Launch]]:
    """torch's own attention over the same K and V, laid out in one run for it; of prompts of one length, empty for anything else."""
    count, length = len(case.lens), int(case.lens[0])
    if case.longest != length or bool((case.lens != length).any()):
        return {}

    def runs(cache: Tensor, table: Tensor) -> Tensor:
        return cache[table.long()].transpose(1, 2).reshape(count, KV_HEADS, -1, DIM)[:, :, :length].contiguous()

    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=DIM**-0.5, enable_gqa=True)
    sets = [(q.view(count, length, HEADS, DIM).transpose(1, 2), runs(pool.k, t), runs(pool.v, t)) for q, t in zip(case.q, case.tables)]
    return {"sdpa": [partial(attend, *inputs) for inputs in sets]}


def share_of_ceiling(case: Attention, us: float) -> float:
    """How much of the chip a launch uses: of what it can read, or of what it can multiply, whichever is more."""
    return max(case.kv_bytes / us / 1e6 / READ_TB_S, case.flops / us / 1e6 / BF16_TFLOP_S)


def mixed(pool: Pool, decode_lens: list[int], prompt_lens: list[int]) -> list[Launch]:
    """Steps of decodes and whole prompts: a decode and a prefill launch each."""
    decodes, prompts = attention(pool, decode_lens).decode(pool), attention(pool, prompt_lens, prompt_lens).prefill(pool)
    return [lambda a=a, b=b: (a(), b()) for a, b in zip(decodes, itertools.cycle(prompts))]


def as_row(name: str, us: float, case: Attention | None, peer_us: dict[str, float]) -> dict[str, Any]:
    """A result as it is printed and kept: TB/s of KV, TFLOP/s, and peers' time over ours (more than 1: we are faster)."""
    row: dict[str, Any] = {"name": name, "us": round(us, 2)}
    if case is not None:
        row["tb_s"] = round(case.kv_bytes / us / 1e6, 3)
        row["tflop_s"] = round(case.flops / us / 1e6, 1)
    return row | {f"{peer}_ratio": round(time / us, 3) for peer, time in peer_us.items()}
