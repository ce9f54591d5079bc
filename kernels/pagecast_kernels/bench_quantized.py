"""All products of one decode step of an 8B model with quantized weights in one CUDA graph, every layer with weights of its own; one
layer's experts of Qwen3-30B-A3B in 4 and 8 bits beside 16."""

import torch

from pagecast_kernels import bench_cases, bench_models, decode, expert_configs, experts, quantized_products, quantized_rows, scaled_products
from pagecast_kernels.bench_products import LAYERS, LLAMA_8B
from pagecast_kernels.decode_flat import StepTiles, StepWorkspace, paged_decode
from pagecast_kernels.quantized_weights import PackedExperts, PackedWeight, ScaledExperts, tile_columns
from pagecast_kernels.routing import Routing

ROWS = (1, 8, 16, 64, 128, 256)


def packed(kind: str, rows: int, columns: int, group: int = 128, paired: bool = False, device: str = "cuda") -> PackedWeight:
    """A weight of random bits."""
    assert kind in ("int4", "int8", "fp8")
    words = torch.randint(-(2**31), 2**31, (rows // 64, columns // tile_columns(kind), 1024), dtype=torch.int32, device=device)
    if kind == "fp8":
        words &= 0x3F3F3F3F  # no NaN, nothing above 1.9
    groups = columns // group if group else 1
    scales = torch.rand((groups, rows), device=device) * 1e-2
    return PackedWeight(kind, rows, columns, group, words, scales, None, paired)


def int4_step(rows: int, weights: list[PackedWeight], workspace: quantized_products.SplitWorkspace) -> bench_cases.Launch:
    """One launch for each weight, in the order of a step."""
    inputs = {k: torch.randn((rows, k), dtype=torch.bfloat16, device="cuda") for k in (4096, 14336)}

    def step() -> None:
        for weight in weights:
            quantized_products.packed_product(inputs[weight.columns], weight, gated=weight.paired, workspace=workspace)

    return step


def fp8_step(rows: int, weights: list[torch.Tensor], workspace: quantized_products.SplitWorkspace) -> bench_cases.Launch:
    """The same with activations that are quantized already, as norms and SiLU·mul leave them."""
    fp8 = torch.float8_e4m3fn
    inputs = {k: quantized_rows.quantize_rows(torch.randn((rows, k), device="cuda").bfloat16(), fp8) for k in (4096, 14336)}
    scale = torch.rand(28672, device="cuda") * 1e-2

    def step() -> None:
        for weight in weights:
            x, x_scale = inputs[weight.shape[1]]
            scaled_products.scaled_product(x, x_scale, weight, scale[: weight.shape[0]], dtype=torch.bfloat16, workspace=workspace)

    return step


def packed_experts(rows: int, columns: int, paired: bool, device: str = "cuda") -> PackedExperts:
    """int4 weights of random bits with groups of 128."""
    count = bench_models.COUNT
    words = torch.randint(-(2**31), 2**31, (count, rows // 64, columns // 128, 1024), dtype=torch.int32, device=device)
    scales = torch.rand((count, columns // 128, rows), device=device) * 1e-2
    return PackedExperts("int4", rows, columns, 128, words, scales, None, paired)


def scaled_experts(rows: int, columns: int, device: str = "cuda") -> ScaledExperts:
    """e4m3 weights of random bits that are numbers."""
    values = torch.randint(0, 63, (bench_models.COUNT, rows, columns), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return ScaledExperts(values, torch.rand((bench_models.COUNT, rows), device=device) * 1e-2)


def expert_launches(kind: str, tokens: int, config: expert_configs.Experts | None = None) -> list[bench_cases.Launch]:
    """Launches of `mixture` of one layer's experts as "int4", "fp8" or "bf16", routing included. config: of both products."""
    inner, hidden = bench_models.INNER, bench_models.HIDDEN
    weights: tuple[experts.Weight, experts.Weight] = bench_models.expert_weights() if kind == "bf16" else (
        (packed_experts(2 * inner, hidden, True), packed_experts(hidden, inner, False)) if kind == "int4"
        else (scaled_experts(2 * inner, hidden), scaled_experts(hidden, inner))
    )  # fmt: skip
    work = experts.experts_workspace(bench_models.COUNT, "cuda")
    both = None if config is None else (config, config)
    return [
        lambda x=x, logits=logits: experts.mixture(x, logits, *weights, Routing(bench_models.CHOSEN), workspace=work, config=both)
        for x, logits in bench_models.expert_inputs(tokens)
    ]


def measure_experts() -> dict[str, float]:
    """kernels.experts_<kind>.<tokens>.us, and the time of bf16 over it."""
    found: dict[str, float] = {}
    for tokens in (1, 16, 64, 256, 2048):
        timed = bench_cases.alternate({kind: expert_launches(kind, tokens) for kind in ("bf16", "int4", "fp8")})
        for kind in ("int4", "fp8"):
            found[f"kernels.experts_{kind}.{tokens}.us"] = timed[kind]
            found[f"kernels.experts_{kind}.{tokens}.ratio_bf16"] = timed["bf16"] / timed[kind]
        print(f"experts {tokens:<6}", *(f"{kind} {us:.1f} us" for kind, us in timed.items()), flush=True)
    return found


def byte_decodes(case: bench_cases.Attention, pool: bench_cases.Pool) -> list[bench_cases.Launch]:
    """Launches of what serving uses for a case's decodes where the cache is of e4m3, the list of tiles being there already."""
    ones = torch.ones(bench_cases.KV_HEADS, device=pool.k.device)
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (pool.k, pool.v))
    work = decode.decode_workspace(len(case.lens), bench_cases.HEADS, bench_cases.KV_HEADS, bench_cases.DIM, pool.k.device)
    steps = [StepWorkspace(work, StepTiles(len(case.lens))) for _ in case.tables]
    return [
        lambda q=q, table=table, step=step: paged_decode(
            q, k, v, table, case.rows, case.lens, bench_cases.DIM**-0.5, workspace=step, k_scale=ones, v_scale=ones
        )
        for q, table, step in zip(case.q, case.tables, steps)
    ]  # fmt: skip


def cache_ratio(lens: list[int]) -> float:
    """Time of decodes over a cache in 16 bits, over that with one of 8."""
    pool = bench_cases.Pool.make(sum(-(-n // bench_cases.BLOCK_SIZE) for n in lens))
    case = bench_cases.attention(pool, lens)
    timed = bench_cases.alternate({"sixteen": case.decode(pool), "eight": byte_decodes(case, pool)})
    return timed["sixteen"] / timed["eight"]


def measure() -> dict[str, float]:
    """kernels.int4_8b.M<rows>.ms and kernels.fp8_8b.M<rows>.ms, without the output head."""
    found: dict[str, float] = {}
    for length in (1024, 4096):
        ratio = cache_ratio([length] * 256)
        found[f"kernels.decode_fp8.256x{length}.ratio_bf16"] = ratio
        print(f"decode 256x{length} over a cache of e4m3: {ratio:.2f} times as fast as in bf16", flush=True)
        torch.cuda.empty_cache()
    found |= measure_experts()
    torch.cuda.empty_cache()
    workspace = quantized_products.split_workspace("cuda")
    shapes = [(*shape, name == "gate_up") for _ in range(LAYERS) for name, shape in LLAMA_8B.items()]
    four = [packed("int4", n, k, paired=paired) for n, k, paired in shapes]
    eight = [torch.randint(0, 63, (n, k), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn) for n, k, _ in shapes]
    for rows in ROWS:
        taken = {"int4": int4_step(rows, four, workspace), "fp8": fp8_step(rows, eight, workspace)}
        for name, step in taken.items():
            found[f"kernels.{name}_8b.M{rows}.ms"] = bench_cases.graph_us([step]) / 1e3
        print(f"products of an 8B step, M={rows}:", *(f"{n} {found[f'kernels.{n}_8b.M{rows}.ms']:.3f} ms" for n in taken), flush=True)
    return found
