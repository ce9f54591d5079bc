"""`pagecast bench overhead`: processor time of every process for a request and for a token, with the oracle in the model's place.

What a small model on a fast GPU waits for. Time of the processor, not of the clock, so other programs on the machine hardly matter.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagecast.bench import engines, results
from pagecast.bench.crowd import Process
from pagecast.cli import bench_serve
from pagecast.cli.options import assignment
from pagecast.cli.quantities import ANY_COUNT, COUNT

VOCAB_SIZE = 49152
"""SmolLM2's."""
SERVE = "serve"
"""Streams of text over TCP, as `pagecast bench serve` asks for them; every other name is a workload of `pagecast bench throughput`."""

Round = Callable[[int], tuple[int, int]]
"""Does one repetition, whose number it is given. Returns requests and output tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", action="append", choices=("short", "chat", SERVE), help="may be repeated (default: all)")
    parser.add_argument("--repetitions", type=COUNT, default=3, help="timed ones, after one that is not; the median counts")
    parser.add_argument("--step-us", type=ANY_COUNT, default=0, help="time of one step of the oracle (default: %(default)s)")
    parser.add_argument("--limit", type=COUNT, help="only the first N requests of a workload")
    parser.add_argument("--num-prompts", type=COUNT, default=600, help="of `serve` (default: %(default)s)")
    parser.add_argument("--tokenizer", help="of `serve`: a model whose tokenizer makes the ids (default: bytes)")
    parser.add_argument("--set", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="a further serve option")
    parser.add_argument("--results", metavar="FOLDER", help="write the result there too, e.g. benchmarks/results")


def children() -> dict[str, int]:
    """Our own processes that this one has started: name to pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_text().split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        if parent != os.getpid():
            continue
        if "pagecast.cli.main" in words:
            role = words[words.index("pagecast.cli.main") + 1]
            number = words[words.index("--index") + 1] if "--index" in words else ""
            found[f"{role} {number}".strip()] = int(folder.name)
        elif "pagecast.bench.load_process" in words:
            found[f"client {folder.name}"] = int(folder.name)
    return found


def cpu_seconds() -> dict[str, float]:
    """Processor time so far of every process, clients together."""
    spent: dict[str, float] = {}
    for name, pid in children().items():
        kind = "client" if name.startswith("client") else name
        spent[kind] = spent.get(kind, 0.0) + Process(pid).cpu_s()
    spent.setdefault("client", time.process_time())
    return spent


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the cluster."""
    chosen = {
        "executor": "oracle", "oracle_vocab_size": VOCAB_SIZE, "oracle_step_us": args.step_us, "max_num_seqs": 256,
        "max_num_batched_tokens": 16384, "max_model_len": 8192, "num_blocks": 60_000,
    }  # fmt: skip
    return chosen | engines.named_values(args.set)


@contextmanager
def offline(args: argparse.Namespace, workload: str) -> Iterator[Round]:
    """A workload through LLM.generate, ids in and ids out."""
    from pagecast.llm import LLM
    from pagecast.sampling import SamplingParams

    with LLM(**options_of(args)) as llm:

        def run(repetition: int) -> tuple[int, int]:
            work = engines.shifted(workload, repetition, VOCAB_SIZE, args.limit)
            params = [SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work]
            outputs = llm.generate([prompt for prompt, _ in work], params, cache_scope=f"repetition-{repetition}")
            return len(work), sum(len(output.outputs[0].token_ids) for output in outputs)

        yield run


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Round]:
    """Streams of text over TCP, from two clients, all at once."""
    from pagecast import cluster
    from pagecast.bench.load_process import Generators

    asked = argparse.Namespace(num_prompts=args.limit or args.num_prompts, input_tokens=256, output_tokens=192, range_ratio=0.6)
    chosen = {"log_level": "warning", "tokenizer": args.tokenizer} | options_of(args)
    with cluster.PrivateCluster(cluster.settings(**chosen)) as private:
        clients = Generators("grpc", private.addresses[0], 2)

        def run(repetition: int) -> tuple[int, int]:
            lines, _ = clients.run(bench_serve.make_asks(asked, None, repetition))
            failed = sorted({line.error for line in lines if line.error})
            if failed:
                raise SystemExit(f"requests failed: {failed}")
            return len(lines), sum(line.tokens for line in lines)

        try:
            yield run
        finally:
            clients.close()


def measure(run: Round, repetitions: int) -> dict[str, float]:
    """Medians over the repetitions: microseconds of each process for a request and for a token, and tokens per second of the clock."""
    figures: dict[str, list[float]] = {}
    for repetition in range(1 + repetitions):
        before, start = cpu_seconds(), time.monotonic()
        requests, tokens = run(repetition)
        elapsed, after = time.monotonic() - start, cpu_seconds()
        if not repetition:
            continue  # connections, caches and lazy imports are not what is measured
        figures.setdefault("tokens_per_s", []).append(tokens / elapsed)
        for name, spent in after.items():
            micros = 1e6 * (spent - before.get(name, 0.0))
            figures.setdefault(f"{name}.us_per_request", []).append(micros / requests)
            figures.setdefault(f"{name}.us_per_token", []).append(micros / tokens)
    return {name: statistics.median(values) for name, values in figures.items()}


def run(args: argparse.Namespace) -> int:
    results.check_folder(args.results)
    metrics: dict[str, float] = {}
    for workload in args.workload or ["short", "chat", SERVE]:
        with served(args) if workload == SERVE else offline(args, workload) as one:
            figures = measure(one, args.repetitions)
        print(f"{workload}: {figures['tokens_per_s']:.0f} output tokens/s")
        for name in sorted(name.removesuffix(".us_per_request") for name in figures if name.endswith(".us_per_request")):
            print(f"  {name:<12} {figures[f'{name}.us_per_request']:8.0f} µs a request {figures[f'{name}.us_per_token']:7.2f} µs a token",
                  flush=True)
        metrics |= {f"overhead.{workload}.{name.replace(' ', '-')}": round(value, 2) for name, value in figures.items()}
    if args.results:
        print(f"written to {results.write(args.results, 'overhead', metrics, {'options': options_of(args)})}")
    return 0
