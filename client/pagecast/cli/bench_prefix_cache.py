"""`pagecast bench prefix_cache`: what the prefix cache costs where nothing is ever found in it.

Two clusters with the oracle, alike but for the cache, serve the same `chat` requests in turn (A-B-B-A ...). No prompt repeats, so the
cache hashes and remembers every block in vain. The oracle takes a fixed time for a step, as a device would.
"""

import argparse
import statistics

from pagecast.bench import results
from pagecast.bench.engines import EngineOptions, Pagecast
from pagecast.bench.progress import Progress
from pagecast.cli.quantities import ANY_COUNT, COUNT

SHARED = ("executor=oracle", "oracle_vocab_size=32000", "max_model_len=4096", "num_blocks=16384")
MODES = ("true", "false")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-us", type=ANY_COUNT, default=5000, help="microseconds of a step (default: %(default)s)")
    parser.add_argument("--limit", type=COUNT, default=300, metavar="N", help="requests of the workload (default: %(default)s)")
    parser.add_argument("--repetitions", type=COUNT, default=6, metavar="N", help="timed rounds of each; the median counts")
    parser.add_argument("--results", metavar="FOLDER", help="write the result there too, e.g. benchmarks/results")


def run(args: argparse.Namespace) -> int:
    results.check_folder(args.results)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens = 0
    engines: dict[str, Pagecast] = {}
    progress = Progress(len(MODES) * (1 + args.repetitions))
    try:
        for mode in MODES:
            extra = (*SHARED, f"oracle_step_us={args.step_us}", f"enable_prefix_caching={mode}")
            engines[mode] = Pagecast(EngineOptions("smollm2-135m", extra=extra))
        for repetition in range(1 + args.repetitions):
            for mode in MODES if repetition % 2 else reversed(MODES):
                took, tokens = engines[mode].run("chat", repetition, args.limit)
                if repetition:  # the first one warms up
                    seconds[mode].append(took)
                progress.advance(f"caching {mode} {took:.2f} s")
    finally:
        progress.close()
        for engine in engines.values():
            engine.close()
    return report(args, seconds, tokens)


def report(args: argparse.Namespace, seconds: dict[str, list[float]], tokens: int) -> int:
    """Print both rates and the cost, and write the file if asked. The cost is the median over rounds, each of which ran both."""
    on, off = (statistics.median(seconds[mode]) for mode in MODES)
    cost = statistics.median(100 * (1 - b / a) for a, b in zip(seconds["true"], seconds["false"], strict=True))
    print(f"with prefix cache, no hits: {tokens / on:9.1f} tokens/s\nwithout prefix cache:       {tokens / off:9.1f} tokens/s")
    print(f"the cache costs {cost:.2f} % of throughput ({args.limit} chat requests, steps of {args.step_us} µs)")
    if args.results:
        metrics = {
            "scheduler.prefix_cache_cost_percent": round(cost, 3), "scheduler.prefix_cache_on.out_tok_s": round(tokens / on, 1),
            "scheduler.prefix_cache_off.out_tok_s": round(tokens / off, 1),
        }  # fmt: skip
        details = {"runs_s": seconds, "step_us": args.step_us, "requests": args.limit}
        print(f"written to {results.write(args.results, 'prefix-cache', metrics, details)}")
    return 0
