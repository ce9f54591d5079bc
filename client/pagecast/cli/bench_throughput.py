"""`pagecast bench throughput` and `pagecast bench latency`: whole workloads offline, ours beside peers, A-B-A-B in one command."""

import argparse
import statistics
from collections.abc import Callable

from pagecast.bench import model_shapes, results, workloads
from pagecast.bench.engines import OURS, Engine, EngineOptions, Pagecast, Peer
from pagecast.bench.progress import Progress
from pagecast.cli.options import assignment
from pagecast.cli.quantities import ANY_COUNT, COUNT, SHARE, Whole

WORKLOADS = ("chat", "seed64", "decode", "prefill", "prefix", "uniform64", "single", "short")


Table = dict[str, dict[str, dict[str, float]]]
"""Workload to engine to figure."""


def add_arguments(parser: argparse.ArgumentParser, workload: str = "chat") -> None:
    parser.add_argument("--random-weights", metavar="SHAPE", default="smol135m", help=f"model shape: {', '.join(model_shapes.SHAPES)}")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help=f"may be given several times (default: {workload})")
    parser.add_argument("--longest-first", action="store_true", help="offer every engine the longest outputs first")
    parser.add_argument("--limit", type=COUNT, help="only the first N requests of each workload")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="timed repetitions of each engine; the median counts")
    parser.add_argument("--repetitions-of", type=repetitions_of, action="append", default=[], metavar="WORKLOAD=N",
                        help="the same for one workload")
    parser.add_argument("--warmup", type=ANY_COUNT, default=1, help="untimed repetitions before")
    parser.add_argument("--max-num-seqs", type=COUNT, default=256, help="of every engine")
    parser.add_argument("--max-num-batched-tokens", type=COUNT, default=16384, help="of every engine")
    parser.add_argument("--max-model-len", type=Whole(2), help="of every engine (default: the model's)")
    parser.add_argument("--gpu-memory-utilization", type=SHARE, default=0.9, help="share of each engine; a peer is resident too")
    parser.add_argument("--peer", choices=("vllm", "transformers", *OURS), help="measure this engine too, alternating with ours; "
                        "batch_invariant: ours with that option, to see what it costs; normal_class: ours, asked in the workload's order "
                        "with requests that are not of class batch")
    parser.add_argument("--peer-defaults", action="store_true", help="the peer at its own defaults")
    parser.add_argument("--in-turn", action="store_true", help="the peer after ours has ended: where memory does not hold both")
    parser.add_argument("--tensor-parallel-size", type=COUNT, default=1, help="GPUs of each engine")
    parser.add_argument("--peer-only", action="store_true", help="measure only the peer")
    parser.add_argument("--set", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="a serve option of ours")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")
    parser.set_defaults(usage_error=parser.error, unnamed=workload)


def repetitions_of(text: str) -> tuple[str, int]:
    """An argparse type."""
    name, sign, number = text.partition("=")
    if name not in WORKLOADS or not sign:
        raise argparse.ArgumentTypeError(f"must be a workload, = and its repetitions, not {text!r}")
    return name, COUNT(number)


def figures(seconds: list[float], tokens: int, work: list[tuple[list[int], int]]) -> dict[str, float]:
    """Median figures of one engine on one workload."""
    median = statistics.median(seconds)
    prompt = sum(len(ids) for ids, _ in work)
    return {
        "s": round(median, 4), "out_tok_s": round(tokens / median, 1), "tot_tok_s": round((tokens + prompt) / median, 1),
        "req_s": round(len(work) / median, 2), "ms_per_token": round(1e3 * median / max(tokens / len(work), 1), 3),
        "spread": round((max(seconds) - min(seconds)) / median, 4), "repetitions": len(seconds),
    }


def measure(engines: list[Engine], workload: str, row: dict[str, dict[str, float]], args: argparse.Namespace, progress: Progress) -> None:
    """Runs `workload` on the engines in turn, repetition by repetition. Every timed run must give every token asked for.

    row: gets the figures of every engine, by name, also where they are interrupted; then of the repetitions that are done.
    device_share: of the time of all repetitions, what the device's steps took, where the engine tells."""
    work = workloads.make(workload)[: args.limit]
    wanted = sum(count for _, count in work)
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    total: dict[str, float] = dict.fromkeys(seconds, 0.0)
    before = {engine.name: engine.device_s() for engine in engines}
    try:
        for repetition in range(args.warmup + repetitions(args, workload)):
            for engine in engines:
                took, tokens = engine.run(workload, repetition + 1, args.limit)
                if tokens != wanted:
                    raise SystemExit(f"{engine.name} gave {tokens} tokens on {workload}, not {wanted}")
                total[engine.name] += took
                if repetition >= args.warmup:
                    seconds[engine.name].append(took)
                progress.advance(f"{workload} · {engine.name} {took:.2f} s")
    except KeyboardInterrupt:
        row |= {name: figures(taken, wanted, work) for name, taken in seconds.items() if taken}
        raise
    row |= {name: figures(taken, wanted, work) for name, taken in seconds.items()}
    for engine in engines:
        since, now = before[engine.name], engine.device_s()
        if since is not None and now is not None:
            row[engine.name]["device_share"] = round((now - since) / total[engine.name], 3)


def repetitions(args: argparse.Namespace, workload: str) -> int:
    """Timed ones."""
    return int(dict(args.repetitions_of).get(workload, args.repetitions))


def run(args: argparse.Namespace) -> int:
    if args.peer is None and (args.peer_only or args.peer_defaults or args.in_turn):
        args.usage_error("--peer-only, --peer-defaults and --in-turn need --peer")
    results.check_folder(args.results)
    chosen = args.workload or [args.unnamed]
    if few := [workload for workload in chosen if repetitions(args, workload) < 3]:
        print(f"note: fewer than three repetitions of {', '.join(few)}; the median is not to be published")
    options = EngineOptions(
        args.random_weights, args.max_num_seqs, args.max_num_batched_tokens, args.gpu_memory_utilization, args.max_model_len,
        args.peer_defaults, tuple(args.set), args.tensor_parallel_size, longest_first=args.longest_first,
    )
    makers: list[Callable[[], Engine]] = [] if args.peer_only else [lambda: Pagecast(options)]
    if args.peer:
        makers.append(lambda: OURS[args.peer](options) if args.peer in OURS else Peer(args.peer, options, args.results))
    table: Table = {workload: {} for workload in chosen}
    cut = ""
    try:
        fill(table, makers, args)
    except (KeyboardInterrupt, SystemExit) as end:  # what has been measured stays
        table = {workload: row for workload, row in table.items() if row}
        if not table:
            raise
        cut = str(end) or "interrupted"
    suffix = "-defaults" if args.peer_defaults else ""
    given = vars(options) | {"extra": list(options.extra)}
    details = {"workloads": table, "options": given}
    path = results.write(args.results, f"throughput-{shape_name(args)}{suffix}", metrics_of(args, table), details)
    show(table)
    print(f"written to {path}")
    if cut:
        raise SystemExit(f"not all was measured: {cut}")
    return 0


def fill(table: Table, makers: list[Callable[[], Engine]], args: argparse.Namespace) -> None:
    """Measures every workload of `table` on every engine: together, or one engine after the other."""
    progress = Progress(len(makers) * sum(args.warmup + repetitions(args, workload) for workload in table))
    for together in [[maker] for maker in makers] if args.in_turn else [makers]:
        engines: list[Engine] = []
        try:
            engines += [maker() for maker in together]
            for workload in table:
                measure(engines, workload, table[workload], args, progress)
        finally:
            for engine in engines:
                engine.close()
    progress.close()


def shape_name(args: argparse.Namespace) -> str:
    return str(args.random_weights) + (f"-tp{args.tensor_parallel_size}" if args.tensor_parallel_size > 1 else "")


def metrics_of(args: argparse.Namespace, table: Table) -> dict[str, float]:
    """Dotted names for targets: throughput.SHAPE.WORKLOAD.ENGINE.FIGURE, and ratio_PEER = peer's time / our time.

    Over several GPUs SHAPE ends in -tp and their number; of the first N requests alone WORKLOAD ends in .firstN, and in .longest_first
    where every engine was offered the longest outputs first."""
    metrics: dict[str, float] = {}
    for load, row in table.items():
        start = f"throughput.{shape_name(args)}.{load}" + (f".first{args.limit}" if args.limit else "")
        start += ".longest_first" if args.longest_first else ""
        for engine, cells in row.items():
            name = f"{engine}-defaults" if args.peer_defaults and engine == args.peer else engine
            metrics |= {f"{start}.{name}.{key}": value for key, value in cells.items()}
        if not args.peer_only and not args.peer_defaults and {args.peer, "pagecast"} <= row.keys():
            metrics[f"{start}.ratio_{args.peer}"] = round(row[args.peer]["s"] / row["pagecast"]["s"], 3)
    return metrics


def show(table: Table) -> None:
    """The result as a table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    columns = ("s", "out_tok_s", "tot_tok_s", "req_s", "ms_per_token", "spread", "repetitions", "device_share")
    out = Table("workload", "engine", "s", "out tok/s", "total tok/s", "req/s", "ms/token", "spread", "runs", "device busy")
    for load, row in table.items():
        for engine, cells in row.items():
            out.add_row(load, engine, *(str(cells.get(key, "")) for key in columns))
    Console(width=120).print(out)
