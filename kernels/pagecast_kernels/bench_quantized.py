"""All products of one decode step of an 8B model with quantized weights in one CUDA graph, every layer with weights of its own."""

import torch

from pagecast_kernels import bench_cases, decode, quantized_products, quantized_rows, scaled_products
from pagecast_kernels.bench_products import LAYERS, LLAMA_8B
from pagecast_kernels.quantized_weights import PackedWeight, tile_columns

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


def cache_ratio(lens: list[int]) -> float:
    """Time of paged_decode over a cache in 16 bits, over that with one of 8."""
    pool = bench_cases.Pool.make(sum(-(-n // bench_cases.BLOCK_SIZE) for n in lens))
    case, ones = bench_cases.attention(pool, lens), torch.ones(bench_cases.KV_HEADS, device="cuda")
    work = decode.decode_workspace(len(lens), bench_cases.HEADS, bench_cases.KV_HEADS, bench_cases.DIM, "cuda")
    k, v = (cache.to(torch.float8_e4m3fn) for cache in (pool.k, pool.v))
    eight: list[bench_cases.Launch] = [
        lambda q=q, table=table: decode.paged_decode(
            q, k, v, table, case.rows, case.lens, bench_cases.DIM**-0.5, workspace=work, k_scale=ones, v_scale=ones
        )
        for q, table in zip(case.q, case.tables)
    ]  # fmt: skip
    timed = bench_cases.alternate({"sixteen": case.decode(pool, None, work), "eight": eight})
    return timed["sixteen"] / timed["eight"]


def measure() -> dict[str, float]:
    """kernels.int4_8b.M<rows>.ms and kernels.fp8_8b.M<rows>.ms, without the output head, whose weights stay as they are."""
    found: dict[str, float] = {}
    for length in (1024, 4096):
        ratio = cache_ratio([length] * 256)
        found[f"kernels.decode_fp8.256x{length}.ratio_bf16"] = ratio
        print(f"decode 256x{length} over a cache of e4m3: {ratio:.2f} times as fast as in bf16", flush=True)
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
