"""`pagecast bench quantized`: an 8B shape with weights and caches of fewer bits beside the same in 16 bits, in one command, on a GPU.

Whole workloads through the engine, engine after engine; then how much memory the weights take and how many blocks are left for KV.
"""

import argparse
import statistics
import sys
import tempfile

from pagecast.bench import model_shapes, results, workloads
from pagecast.bench.engines import EngineOptions, Pagecast
from pagecast.bench.progress import Progress
from pagecast.cli.quantities import ANY_COUNT, COUNT, Names

VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "bf16": ({}, ("single", "seed64", "decode")),
    "int4": ({"quantization": "int4"}, ("single", "seed64")),
    "fp8": ({"quantization": "fp8"}, ("single", "decode")),
    "fp8_kv": ({"kv_cache_dtype": "fp8"}, ("decode",)),
}
"""Options of serve, and what is run with them."""
RATIOS = {
    "quantization.int4.batch1.ratio_bf16": ("int4", "single"), "quantization.int4.batch64.ratio_bf16": ("int4", "seed64"),
    "quantization.fp8.batch1.ratio_bf16": ("fp8", "single"), "quantization.fp8.batch256.ratio_bf16": ("fp8", "decode"),
    "quantization.fp8_kv.256x1024.ratio_bf16": ("fp8_kv", "decode"),
}  # fmt: skip
"""Time of bf16 over that of the variant, on a workload."""
MIXTURE = {"bf16": {}, "int4": {"quantization": "int4"}, "fp8": {"quantization": "fp8"}}
"""The same of a mixture of experts, on single and seed64."""
PARTS = ("8b", "memory", "70b", "moe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=Names(PARTS), default="8b,memory",
                        help=f"of {', '.join(PARTS)}, separated by commas (default: %(default)s)")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="timed repetitions; the median counts (default: %(default)s)")
    parser.add_argument("--warmup", type=ANY_COUNT, default=1, help="untimed repetitions before (default: %(default)s)")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")


def run(args: argparse.Namespace) -> int:
    from pagecast_kernels import bench_cases

    if not bench_cases.has_gpu():
        print("pagecast bench quantized: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    parts = args.parts
    results.check_folder(args.results)
    metrics: dict[str, float] = {}
    if "8b" in parts:
        seconds = {name: _seconds("llama8b", VARIANTS[name], args) for name in VARIANTS}
        metrics |= {key: seconds["bf16"][load] / seconds[name][load] for key, (name, load) in RATIOS.items()}
        metrics |= {f"quantization.{name}.{load}.s": value for name, row in seconds.items() for load, value in row.items()}
    if "memory" in parts:
        metrics |= memory_metrics()
    if "70b" in parts:
        row = _seconds("llama70b", ({"quantization": "int4", "max_num_seqs": "64"}, ("single", "seed64")), args)
        work = {load: sum(count for _, count in workloads.make(load)) for load in row}
        metrics |= {"throughput.llama70b-int4.single.pagecast.ms_per_token": 1e3 * row["single"] / work["single"]}
        metrics |= {"throughput.llama70b-int4.seed64.pagecast.out_tok_s": work["seed64"] / row["seed64"]}
    if "moe" in parts:
        rows = {name: _seconds("qwen3-30b-a3b", (options, ("single", "seed64")), args) for name, options in MIXTURE.items()}
        for name, load in ((name, load) for name in ("int4", "fp8") for load in ("single", "seed64")):
            metrics[f"quantization.moe.{name}.{load}.ratio_bf16"] = rows["bf16"][load] / rows[name][load]
    for key, value in metrics.items():
        print(f"{key:60} {value:10.3f}")
    print(results.write(args.results, "quantized", metrics, {"repetitions": args.repetitions}))
    return 0


def _seconds(shape: str, variant: tuple[dict[str, str], tuple[str, ...]], args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each workload. Every run must give every token asked for."""
    options, loads = variant
    rows = int(options.get("max_num_seqs", "256"))
    extra = tuple(f"{name}={value}" for name, value in options.items() if name != "max_num_seqs")
    engine = Pagecast(EngineOptions(shape, rows, 16384, 0.9, None, False, extra))
    progress = Progress(len(loads) * (args.warmup + args.repetitions))
    found: dict[str, float] = {}
    try:
        for load in loads:
            wanted, taken = sum(count for _, count in workloads.make(load)), []
            for repetition in range(args.warmup + args.repetitions):
                seconds, tokens = engine.run(load, repetition + 1, None)
                if tokens != wanted:
                    raise SystemExit(f"{tokens} tokens on {load}, not {wanted}")
                taken += [seconds] if repetition >= args.warmup else []
                progress.advance(f"{shape} {' '.join(extra) or 'bf16'} · {load} {seconds:.3f} s")
            found[load] = statistics.median(taken)
    finally:
        progress.close()
        engine.close()
    return found


def memory_metrics() -> dict[str, float]:
    """Bytes of all weights, and blocks of KV, as shares of those in 16 bits. Each variant is loaded in this process and dropped."""
    from pagecast_worker.measure_memory import weights_and_blocks

    weights: dict[str, int] = {}
    blocks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="pagecast-bench-") as folder:
        shape = model_shapes.write("llama8b", folder)
        for name, (options, _) in VARIANTS.items():
            weights[name], blocks[name] = weights_and_blocks(shape, {"max_model_len": 8192, **options})
            print(f"{name}: {weights[name] / 1e9:.3f} GB without the cache, {blocks[name]} blocks", flush=True)
    return {
        "quantization.fp8_kv.capacity_ratio": blocks["fp8_kv"] / blocks["bf16"],
        "quantization.int4.memory_ratio": weights["int4"] / weights["bf16"],
        "quantization.fp8.memory_ratio": weights["fp8"] / weights["bf16"],
    }  # fmt: skip
