"""`pagecast bench quantized`: an 8B shape with weights and caches of fewer bits beside the same in 16 bits, in one command, on a GPU.

Whole workloads through the engine, engine after engine; then how much memory the weights take and how many blocks are left for KV.
What has been measured is written even if the command is interrupted.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pagecast.bench import model_shapes, results, workloads
from pagecast.bench.engines import EngineOptions, Pagecast, Peer
from pagecast.bench.progress import Progress
from pagecast.cli.quantities import ANY_COUNT, COUNT, Names

VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "bf16": ({}, ("single", "uniform64", "decode", "context1k")),
    "int4": ({"quantization": "int4"}, ("single", "uniform64")),
    "fp8": ({"quantization": "fp8"}, ("single", "decode")),
    "fp8_kv": ({"kv_cache_dtype": "fp8"}, ("context1k",)),
}
"""Options of serve, and what is run with them. context1k counts decodes alone: what its prompts take once they are cached comes off."""
STARTED_TOGETHER = (("bf16", "int4"), ("fp8", "fp8_kv"))
BLOCKS = {"bf16": 18432, "int4": 4096, "fp8": 11264, "fp8_kv": 18432}
"""Of KV, of 16 tokens, enough for these workloads: engines that start together cannot measure what memory there is. 65 GB at the most."""
RATIOS = {
    "quantization.int4.batch1.ratio_bf16": ("int4", "single"), "quantization.int4.batch64.ratio_bf16": ("int4", "uniform64"),
    "quantization.fp8.batch1.ratio_bf16": ("fp8", "single"), "quantization.fp8.batch256.ratio_bf16": ("fp8", "decode"),
    "quantization.fp8_kv.256x1024.ratio_bf16": ("fp8_kv", "context1k"),
}  # fmt: skip
"""Time of bf16 over that of the variant, on a workload."""
MIXTURE = {"bf16": {}, "int4": {"quantization": "int4"}, "fp8": {"quantization": "fp8"}}
"""The same of a mixture of experts, on single and seed64."""
ONCE = {("llama70b", "seed64")}
"""Takes a minute: run once, whatever `--repetitions` says."""
LONG = ("decode", "seed64")
"""Workloads that are not run untimed first: shorter ones have gone before."""
SHARE = 0.45
"""Of memory, for the 8B shape: a peer, or a second engine, is resident too."""
PARTS = ("8b", "vllm", "memory", "70b", "moe")
"""In this order."""
Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=Names(PARTS), default="8b,memory",
                        help=f"of {', '.join(PARTS)}, separated by commas (default: %(default)s); vllm: its int4 weights beside ours")
    parser.add_argument("--variants", type=Names(tuple(VARIANTS)), default=",".join(VARIANTS),
                        help="engines of part 8b, separated by commas; ratios need bf16 in the same run (default: all)")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="timed repetitions; the median counts (default: %(default)s)")
    parser.add_argument("--warmup", type=ANY_COUNT, default=1, help="untimed repetitions before (default: %(default)s)")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")


def run(args: argparse.Namespace) -> int:
    from pagecast_kernels import bench_cases

    if not bench_cases.has_gpu():
        print("pagecast bench quantized: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    results.check_folder(args.results)
    steps = {"8b": _dense, "vllm": _beside_vllm, "memory": _memory, "70b": _large, "moe": _mixture}
    metrics: Figures = {}
    status = 0
    for part in (name for name in steps if name in args.parts):
        try:
            steps[part](metrics, args)
        except KeyboardInterrupt:
            print(f"ended in {part}; what was measured before is kept")
            status = 130
            break
        except SystemExit as ended:  # an engine that failed costs its own part
            print(f"{part}: {ended}", file=sys.stderr)
            status = 1
    if not metrics:
        return status or 1
    for key, value in metrics.items():
        print(f"{key:60} {value:10.3f}")
    print(results.write(args.results, "quantized", metrics, {"repetitions": args.repetitions}))
    return status


def _dense(metrics: Figures, args: argparse.Namespace) -> None:
    for names in STARTED_TOGETHER:
        wanted = [name for name in names if name in args.variants]
        with ThreadPoolExecutor(len(names)) as pool:
            options = {name: VARIANTS[name][0] | {"num_blocks": str(BLOCKS[name])} for name in wanted}
            started = {name: pool.submit(_engine, "llama8b", options[name], SHARE) for name in wanted}
        engines = {name: one.result() for name, one in started.items() if one.exception() is None}
        try:
            for name in wanted:
                for load, seconds in _measured(started[name].result(), _label("llama8b", VARIANTS[name][0]), VARIANTS[name][1], args):
                    metrics[f"quantization.{name}.{load}.s"] = seconds
                    _compare(metrics)
        finally:
            for engine in engines.values():
                engine.close()


def _compare(metrics: Figures) -> None:
    """Adds every ratio whose both sides are known."""
    for key, (name, load) in RATIOS.items():
        plain, own = (metrics.get(f"quantization.{side}.{load}.s") for side in ("bf16", name))
        if plain is not None and own is not None:
            metrics[key] = plain / own


def _beside_vllm(metrics: Figures, args: argparse.Namespace) -> None:
    """One request at a time through our int4 weights and vLLM's, in turn, both resident."""
    ours = _engine("llama8b", VARIANTS["int4"][0], SHARE)
    try:
        # One request runs at a time: fewer rows mean fewer graphs to capture, and the same one is run.
        peer = Peer("vllm", EngineOptions("llama8b", 16, 16384, SHARE, checkpoint="int4"), args.results)
        try:
            taken: dict[str, list[float]] = {ours.name: [], peer.name: []}
            for repetition in range(args.warmup + args.repetitions):
                for engine in (ours, peer):
                    seconds = _timed(engine, "single", repetition + 1)
                    taken[engine.name] += [seconds] if repetition >= args.warmup else []
        finally:
            peer.close()
    finally:
        ours.close()
    own, other = (statistics.median(seconds) for seconds in taken.values())
    metrics |= {"quantization.int4.beside.single.s": own, "quantization.int4.vllm.single.s": other}
    metrics["quantization.int4.batch1.ratio_vllm"] = other / own


def _large(metrics: Figures, args: argparse.Namespace) -> None:
    """One engine of the 70B shape; the long workload comes last."""
    for load, seconds in _seconds("llama70b", {"quantization": "int4", "max_num_seqs": "64"}, ("single", "seed64"), args, 0.9):
        work = sum(count for _, count in workloads.make(load))
        if load == "single":
            metrics["throughput.llama70b-int4.single.pagecast.ms_per_token"] = 1e3 * seconds / work
        else:
            metrics[f"throughput.llama70b-int4.{load}.pagecast.out_tok_s"] = work / seconds


def _mixture(metrics: Figures, args: argparse.Namespace) -> None:
    rows = {name: dict(_seconds("qwen3-30b-a3b", options, ("single", "seed64"), args, 0.9)) for name, options in MIXTURE.items()}
    for name, load in ((name, load) for name in ("int4", "fp8") for load in ("single", "seed64")):
        metrics[f"quantization.moe.{name}.{load}.ratio_bf16"] = rows["bf16"][load] / rows[name][load]


def _engine(shape: str, options: dict[str, str], share: float) -> Pagecast:
    rows = int(options.get("max_num_seqs", "256"))
    extra = tuple(f"{name}={value}" for name, value in options.items() if name != "max_num_seqs")
    return Pagecast(EngineOptions(shape, rows, 16384, share, None, False, extra))


def _timed(engine: Pagecast | Peer, load: str, repetition: int) -> float:
    """Seconds of a run, which must give every token asked for."""
    seconds, tokens = engine.run(load, repetition, None)
    wanted = sum(count for _, count in workloads.make(load))
    if tokens != wanted:
        raise SystemExit(f"{tokens} tokens on {load}, not {wanted}")
    return seconds


def _run(engine: Pagecast, load: str, repetition: int) -> float:
    if load != "context1k":
        return _timed(engine, load, repetition)
    # Always the same prompts: the first run, which is not timed, leaves them in the cache.
    return _timed(engine, load, 1) - _timed(engine, f"{load}_start", 1)


def _label(shape: str, options: dict[str, str]) -> str:
    return f"{shape} {' '.join(f'{name}={value}' for name, value in options.items()) or 'bf16'}"


def _seconds(
    shape: str, options: dict[str, str], loads: tuple[str, ...], args: argparse.Namespace, share: float
) -> Iterator[tuple[str, float]]:
    """Median seconds of each workload, as soon as it is done, by an engine of its own."""
    engine = _engine(shape, options, share)
    try:
        yield from _measured(engine, _label(shape, options), loads, args)
    finally:
        engine.close()


def _measured(engine: Pagecast, label: str, loads: tuple[str, ...], args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Median seconds of each workload, as soon as it is done. label begins with the shape."""
    progress, shape = Progress(len(loads) * (args.warmup + args.repetitions)), label.split()[0]
    try:
        for load in loads:
            warmup = max(args.warmup, 1) if load == "context1k" else 0 if load in LONG else args.warmup
            taken = []
            for repetition in range(warmup + (1 if (shape, load) in ONCE else args.repetitions)):
                seconds = _run(engine, load, repetition + 1)
                taken += [seconds] if repetition >= warmup else []
                progress.advance(f"{label} · {load} {seconds:.3f} s")
            yield load, statistics.median(taken)
    finally:
        progress.close()


def _memory(metrics: Figures, args: argparse.Namespace) -> None:
    """Bytes of all weights, and blocks of KV, as shares of those in 16 bits. Each variant is loaded in this process and dropped."""
    from pagecast_worker.measure_memory import weights_and_blocks

    weights: dict[str, int] = {}
    blocks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="pagecast-bench-") as folder:
        shape = model_shapes.write("llama8b", folder)
        for name, (options, _) in VARIANTS.items():
            weights[name], blocks[name] = weights_and_blocks(shape, {"max_model_len": 8192, **options})
            print(f"{name}: {weights[name] / 1e9:.3f} GB of weights, {blocks[name]} blocks", flush=True)
    metrics["quantization.fp8_kv.capacity_ratio"] = blocks["fp8_kv"] / blocks["bf16"]
    for name in ("int4", "fp8"):
        metrics[f"quantization.{name}.memory_ratio"] = weights[name] / weights["bf16"]
