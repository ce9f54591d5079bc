"""Finds the fastest launch of every few-row product on the GPU at hand, beside cuBLAS, and prints a table for gemm_table.py.

    PYTHONPATH=kernels python kernels/gemm_tune.py [--shapes llama8b] [--rows 1,8,...] [--seconds 60]

Every product is timed in a CUDA graph over rotating copies of the weight (at least 300 MB, so nothing is read from L2).
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from pagecast_kernels.gemm import GemmConfig, GemmWorkspace, linear_with
from pagecast_kernels.gemv import GemvConfig, gemv_with

SHAPES = {  # name: (N, K, how many in a step)
    "llama8b": {"qkv": (6144, 4096, 32), "o": (4096, 4096, 32), "gate_up": (28672, 4096, 32), "down": (4096, 14336, 32), "head": (128256, 4096, 1)},
    "smol135m": {"qkv": (960, 576, 30), "o": (576, 576, 30), "gate_up": (3072, 576, 30), "down": (576, 1536, 30), "head": (49152, 576, 1)},
}
FEW = [
    GemmConfig(64, 128, 4, 4, 2), GemmConfig(64, 128, 6, 4, 1), GemmConfig(64, 64, 6, 4, 3), GemmConfig(128, 64, 6, 4, 2), GemmConfig(128, 128, 3, 4, 2),
    GemmConfig(128, 128, 5, 4, 1), GemmConfig(64, 256, 3, 4, 2), GemmConfig(64, 256, 5, 4, 1), GemmConfig(128, 64, 4, 8, 3),
]
MANY = [
    GemmConfig(128, 64, 4, 8, 1), GemmConfig(128, 64, 3, 8, 1), GemmConfig(128, 64, 4, 8, 1, 128), GemmConfig(128, 128, 3, 8, 1, 128),
    GemmConfig(128, 64, 5, 8, 1, 128), GemmConfig(128, 64, 3, 4, 2, 64), GemmConfig(256, 64, 4, 8, 1, 128), GemmConfig(128, 64, 3, 8, 2, 128),
    GemmConfig(64, 64, 4, 4, 1), GemmConfig(64, 64, 4, 4, 2, 128), GemmConfig(64, 128, 3, 4, 2, 64), GemmConfig(128, 128, 4, 8, 1, 64),
]


def candidates(rows: int) -> list[GemmConfig]:
    """Launches worth trying for this many rows."""
    return FEW if rows <= 32 else FEW[:6] + MANY if rows <= 64 else MANY


def compile_one(job: tuple[GemmConfig | GemvConfig, int]) -> str:
    """Fill the kernel cache for one launch; returns what went wrong, or nothing."""
    config, rows = job
    try:
        if isinstance(config, GemvConfig):
            gemv_with(torch.randn(1, 4096, device="cuda").bfloat16(), torch.randn(64, 4096, device="cuda").bfloat16(), config)
            torch.cuda.synchronize()
            return ""
        x, weight = (torch.randn(n, 256, device="cuda", dtype=torch.bfloat16) for n in (rows, 512))
        linear_with(x, weight, config, GemmWorkspace(x.device, 32 << 20, 64), 4)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{config} rows {rows}: {type(error).__name__}: {str(error)[:120]}"
    return ""


def check(config: GemmConfig | GemvConfig, rows: int, workspace: GemmWorkspace, num_sms: int) -> float:
    """Relative error against float64 on a shape with ragged edges, output poisoned with NaN before."""
    x, weight = torch.randn(rows, 1096, device="cuda").bfloat16(), torch.randn(1208, 1096, device="cuda").bfloat16()
    out = torch.full((rows, 1208), float("nan"), device="cuda", dtype=torch.bfloat16)
    if isinstance(config, GemvConfig):
        gemv_with(x, weight, config, out)
    else:
        linear_with(x, weight, config, workspace, num_sms, out)
    want = x.double() @ weight.double().T
    return float(torch.linalg.norm(out.double() - want) / torch.linalg.norm(want))


def time_us(launch, copies: int) -> float:
    """Median microseconds of one launch(i), over graph replays that go through every copy."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(copies):
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            launch(i)
    taken = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * start.elapsed_time(end) / copies)
    return statistics.median(taken[1:])


def tune(name: str, rows_list: list[int], workspace: GemmWorkspace, num_sms: int, bad: set[str]) -> dict[str, dict[str, object]]:
    table: dict[str, dict[str, object]] = {}
    for part, (columns, depth, count) in SHAPES[name].items():
        copies = max(2, -(-300_000_000 // (2 * columns * depth)))
        weights = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for rows in rows_list:
            x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
            library = {}
            for kind in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(kind)
                library[kind] = time_us(lambda i, x=x, out=out: torch.mm(x, weights[i].T, out=out), copies)
            ours = {}
            for config in candidates(rows):
                if f"{config}/{rows}" in bad:
                    continue
                try:
                    ours[config] = time_us(lambda i, x=x, out=out, config=config: linear_with(x, weights[i], config, workspace, num_sms, out), copies)
                except Exception as error:
                    print("failed", config, rows, type(error).__name__, str(error)[:80], flush=True)
            best = min(ours, key=ours.__getitem__)
            floor = 2 * columns * depth / 4.55e6
            table[f"{part}/{rows}"] = {"cublas": library["cublas"], "cublaslt": library["cublaslt"], "ours": ours[best], "config": list(best),
                                       "count": count, "all": {str(tuple(c)): round(t, 2) for c, t in ours.items()}}
            print(f"{part:8} M={rows:<4} cublas {library['cublas']:8.1f} lt {library['cublaslt']:8.1f} ours {ours[best]:8.1f} us  floor {floor:6.1f} {tuple(best)}", flush=True)
        del weights
    return table


PDL = [GemmConfig(64, 128, 6, 4, 1), GemmConfig(64, 256, 5, 4, 1), GemmConfig(64, 128, 5, 4, 1, 0, 0), GemmConfig(64, 128, 5, 4, 1, 0, 512)]
GEMV = [
    GemvConfig(rows, depth, stages, warps, prefetch)
    for rows, depth, stages, warps in (
        (16, 1024, 1, 4), (16, 512, 1, 4), (16, 512, 3, 4), (8, 1024, 1, 4), (8, 1024, 3, 4), (4, 2048, 1, 4), (8, 512, 4, 4), (32, 512, 1, 8),
        (4, 1024, 4, 4), (16, 512, 2, 8), (8, 512, 1, 2), (4, 1024, 1, 2),
    )
    for prefetch in (-1, 0, 1024, 4096)
]
"""Launches for chains of products, where a programmatic launch hides the start of one kernel behind the end of another."""


def chain(name: str, rows_list: list[int], workspace: GemmWorkspace, num_sms: int) -> dict[str, float]:
    """Milliseconds of all products of one step, in one graph with weights of their own per layer: the target's measure."""
    parts = SHAPES[name]
    layers = max(count for _, _, count in parts.values())
    weights = {part: [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)] for part, (n, k, count) in parts.items()}
    order = [(part, i) for i in range(layers) for part, (_, _, count) in parts.items() if count > 1] + [
        (part, 0) for part, (_, _, count) in parts.items() if count == 1]
    result = {}
    for rows in rows_list:
        xs = {k: torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for _, k, _ in parts.values()}
        outs = {n: torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) for n, _, _ in parts.values()}

        def one(part: str, i: int, config: GemmConfig | GemvConfig | None, xs=xs, outs=outs) -> None:
            n, k, _ = parts[part]
            if config is None:
                torch.mm(xs[k], weights[part][i].T, out=outs[n])
            elif isinstance(config, GemvConfig):
                gemv_with(xs[k], weights[part][i], config, outs[n])
            else:
                linear_with(xs[k], weights[part][i], config, workspace, num_sms, outs[n])

        for config in [None, *(PDL if rows <= 16 else []), *(GEMV if rows == 1 else [])]:
            try:
                spent = time_us(lambda _, config=config, one=one: [one(part, i, config) for part, i in order], 1) / 1e3
            except Exception as error:
                print("chain failed", config, type(error).__name__, str(error)[:80])
                continue
            result[f"M{rows}/{'cublas' if config is None else tuple(config)}"] = spent
            print(f"chain {name} M={rows} {'cublas' if config is None else tuple(config)}: {spent:.3f} ms", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama8b")
    parser.add_argument("--rows", default="1,8,16,32,64,128,192,256")
    parser.add_argument("--chain", action="store_true", help="only the whole step's products in one graph")
    args = parser.parse_args()
    rows_list = [int(n) for n in args.rows.split(",")]
    begin = time.perf_counter()
    jobs = [(config, rows) for rows in rows_list for config in (PDL if args.chain and rows <= 16 else candidates(rows))]
    jobs += [(config, 1) for config in GEMV] if args.chain and 1 in rows_list else []
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        problems = [text for text in pool.map(compile_one, jobs, chunksize=4) if text]
    print(f"compiled {len(jobs)} launches in {time.perf_counter() - begin:.0f} s; problems: {problems}", flush=True)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = GemmWorkspace(torch.device("cuda"))
    errors = {}
    for config, rows in jobs:
        try:
            errors[f"{config}/{rows}"] = check(config, rows, workspace, num_sms)
        except Exception as error:
            print("check failed", config, rows, type(error).__name__, str(error)[:100])
            errors[f"{config}/{rows}"] = 1.0
    bad = {key for key, error in errors.items() if not error < 1e-2}
    print(f"worst relative error {max(errors.values()):.2e}; wrong: {sorted(bad)}", flush=True)
    result: dict[str, object] = {}
    for name in args.shapes.split(","):
        if args.chain:
            result[name] = chain(name, rows_list, workspace, num_sms)
            continue
        result[name] = tune(name, rows_list, workspace, num_sms, bad)
        for rows in rows_list:
            cells = [cell for key, cell in result[name].items() if key.endswith(f"/{rows}")]
            sums = {kind: sum(float(cell[kind]) * int(cell["count"]) for cell in cells) / 1e3 for kind in ("cublas", "cublaslt", "ours")}
            best = sum(min(float(c["cublas"]), float(c["cublaslt"]), float(c["ours"])) * int(c["count"]) for c in cells) / 1e3
            print(f"{name} M={rows}: step products, ms: cublas {sums['cublas']:.3f} cublaslt {sums['cublaslt']:.3f} ours {sums['ours']:.3f} best of all {best:.3f}")
    folder = os.environ.get("OUT")
    if folder:
        with open(f"{folder}/gemm_tune.json", "w") as file:
            json.dump(result, file)
    print(f"total {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
