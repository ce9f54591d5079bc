"""`pagecast bench allreduce`: sums over this machine's GPUs, 8 KB to 8 MB: NCCL, and one and two shots over memory that GPUs share,
alone and with the residual sum and RMSNorm that follow in a layer; inside CUDA graphs, checked before they are timed."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pagecast.cli.quantities import Whole

LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=Whole(2), help="processes, one for each GPU (default: every GPU; without GPUs two, over gloo)")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")


def measured(ranks: int) -> dict[str, dict[str, float]]:
    """Microseconds by bytes and way. Raises RuntimeError with what a rank said last."""
    with tempfile.TemporaryDirectory(prefix="pagecast-bench-") as folder:
        command = [sys.executable, "-m", "pagecast_worker.measure_all_reduce"]
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen([*command, str(rank), str(ranks), str(Path(folder) / "meet")], stdout=pipe, stderr=pipe, text=True)
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks did not come to an end within {LIMIT_S:g} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(error.strip().splitlines()[-1] if error.strip() else f"a rank ended with {process.returncode}")
    found: dict[str, dict[str, float]] = json.loads(outputs[0][0].strip().splitlines()[-1])
    return found


def show(table: dict[str, dict[str, float]]) -> None:
    """The table, in microseconds."""
    ways = list(dict.fromkeys(way for row in table.values() for way in row))
    print(f"{'KiB':>6}", *(f"{way:>19}" for way in ways))
    for nbytes, row in table.items():
        print(f"{int(nbytes) >> 10:>6}", *(f"{row[way]:19.1f}" if way in row else " " * 19 for way in ways))


def run(args: argparse.Namespace) -> int:
    import torch

    from pagecast.bench import results

    results.check_folder(args.results)
    ranks = args.ranks or torch.cuda.device_count() or 2
    if ranks < 2:
        print("pagecast bench allreduce: a sum needs at least two ranks, and here is one GPU", file=sys.stderr)
        return 2
    try:
        table = measured(ranks)
    except RuntimeError as error:
        print(f"pagecast bench allreduce: {error}", file=sys.stderr)
        return 1
    show(table)
    metrics = {
        f"allreduce.ranks{ranks}.{int(nbytes) >> 10}k.{way.replace(', then ', '_then_').replace(' ', '_')}.us": value
        for nbytes, row in table.items()
        for way, value in row.items()
    }
    print(results.write(args.results, "allreduce", metrics, {}))
    return 0
