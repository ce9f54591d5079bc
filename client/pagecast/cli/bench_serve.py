"""`pagecast bench serve`: latency and throughput of a server over real gRPC, or of any OpenAI-compatible peer, under load."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from pagecast.bench import load, results
from pagecast.bench.load_process import Generators
from pagecast.cli.quantities import COUNT, Number
from pagecast.sync import Client

WORDS = ["time", "river", "stone", "light", "paper", "green", "house", "window", "summer", "night", "water", "music", "story", "letter"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="a running Pagecast server")
    parser.add_argument("--peer-url", metavar="URL", help="also measure this OpenAI-compatible server, alternating")
    parser.add_argument("--peer-only", action="store_true", help="measure only --peer-url")
    parser.add_argument("--name", default="server", help="goes into the metric names")
    parser.add_argument("--rate", action="append", type=Number(above=0),
                        help="requests a second; several give a curve (default: unbounded)")
    parser.add_argument("--num-prompts", type=COUNT, default=600, help="requests of each repetition")
    parser.add_argument("--input-tokens", type=COUNT, default=256, help="mean prompt length, in words of about one token")
    parser.add_argument("--output-tokens", type=COUNT, default=192, help="mean output length")
    parser.add_argument("--range-ratio", type=Number(least=0, most=1), default=0.6, help="lengths are uniform within mean x (1 +- ratio)")
    parser.add_argument("--clients", type=COUNT, default=2, metavar="N",
                        help="processes that ask: the client is not to be what is measured")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="of every rate and server; the median counts")
    parser.add_argument("--ttft-limit-ms", type=Number(above=0), help="goodput counts requests within this")
    parser.add_argument("--tpot-limit-ms", type=Number(above=0), help="and this")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")
    parser.add_argument("--plot", metavar="FILE.png", help="draw latency against rate")
    parser.set_defaults(usage_error=parser.error)


def make_asks(args: argparse.Namespace, rate: float | None, repetition: int) -> list[load.Ask]:
    """Prompts of random words, different in every repetition, so that nothing is cached from the one before."""
    rng = np.random.default_rng(1000 + repetition)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - args.range_ratio))), round(mean * (1 + args.range_ratio))
        return [int(n) for n in rng.integers(low, high + 1, args.num_prompts)]

    prompts = [f"{repetition}-{i} " + " ".join(rng.choice(WORDS, n)) for i, n in enumerate(lengths(args.input_tokens))]
    return load.poisson_asks(prompts, lengths(args.output_tokens), rate, repetition)


def measure(args: argparse.Namespace, targets: dict[str, Generators], rate: float | None) -> dict[str, dict[str, Any]]:
    """Alternates the targets; returns per target the summary of the repetition with the median throughput."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
    for repetition in range(args.repetitions):
        asks = make_asks(args, rate, repetition)
        for name, target in targets.items():
            lines, seconds = target.run(asks)
            summary = load.summarize(lines, seconds, args.ttft_limit_ms, args.tpot_limit_ms)
            if summary["failed"]:
                kinds = sorted({line.error for line in lines if line.error})
                print(f"{name}: {summary['failed']} of {summary['requests']} requests failed: {kinds}")
            runs[name].append(summary)
            middle = {kind: round(summary[kind].get("p50", 0.0), 2) for kind in ("ttft_ms", "tpot_ms")}
            print(f"rate {rate or 'unbounded'} · {name}: {summary['out_tok_s']} tok/s, p50 {middle}", flush=True)
    return {name: sorted(found, key=lambda run: run["out_tok_s"])[len(found) // 2] for name, found in runs.items()}


def measure_all(args: argparse.Namespace) -> list[tuple[float | None, dict[str, dict[str, Any]]]]:
    targets: dict[str, Generators] = {}
    if not args.peer_only:
        targets["pagecast"] = Generators("grpc", args.target, args.clients)
    if args.peer_url:
        targets["peer"] = Generators("openai", args.peer_url, args.clients)
    try:
        for target in targets.values():  # connections, caches and lazy imports are not what is measured
            target.run(make_asks(args, None, 999)[: 2 * args.clients])
        return [(rate, measure(args, targets, rate)) for rate in args.rate or [None]]
    finally:
        for target in targets.values():
            target.close()


def metrics_of(name: str, points: list[tuple[float | None, dict[str, dict[str, Any]]]]) -> dict[str, float]:
    """serve.NAME.RATE.ENGINE.FIGURE."""
    metrics: dict[str, float] = {}
    for rate, row in points:
        for engine, summary in row.items():
            start = f"serve.{name}.{rate or 'unbounded'}.{engine}"
            metrics |= {f"{start}.{key}": summary[key] for key in ("out_tok_s", "req_s", "goodput_req_s", "failed", "tokens_per_message")}
            for kind in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
                metrics |= {f"{start}.{kind}.{key}": round(value, 3) for key, value in summary[kind].items()}
    return metrics


def plot(path: str, points: list[tuple[float | None, dict[str, dict[str, Any]]]]) -> None:
    """p50 and p99 of TTFT and TPOT against the rate, one line an engine."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    rated = [(rate, row) for rate, row in points if rate]
    for axis, kind in zip(axes, ("ttft_ms", "tpot_ms"), strict=True):
        for engine in rated[0][1] if rated else ():
            for share, style in (("p50", "-"), ("p99", "--")):
                heights = [row[engine][kind][share] for _, row in rated]
                axis.plot([rate for rate, _ in rated], heights, style, marker="o", label=f"{engine} {share}")
        axis.set(xlabel="requests a second", ylabel=kind.replace("_", " "), title=kind[:4].upper())
        axis.legend()
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> int:
    if args.peer_only and args.peer_url is None:
        args.usage_error("--peer-only needs --peer-url")
    results.check_folder(args.results)
    results.check_file(args.plot)
    if not args.peer_only:
        with Client(args.target) as client:
            client.health(timeout=10.0)  # or it is said why there is none, not by every request
    points = measure_all(args)
    details = {"points": [{"rate": rate, "engines": row} for rate, row in points]}
    path = results.write(args.results, f"serve-{args.name}", metrics_of(args.name, points), details)
    if args.plot:
        plot(args.plot, points)
    print(f"written to {path}")
    return 0 if all(summary["failed"] == 0 for _, row in points for summary in row.values()) else 1
