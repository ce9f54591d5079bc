"""Runs seeds of the simulator: `python tests/sim/run.py --seeds 10000`, or one again with its trace: `--seed 17`.

Exit status 1 if any seed failed. Every failure ends with the one-line command that replays it.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim.world import SimulationFailed, simulate

CHUNK = 50
"""Seeds per task: small enough that a failure stops the run soon, large enough to hide the cost of a task."""


@dataclass(slots=True)
class Tally:
    """Sums over many seeds. failures: text per failed seed."""

    num_seeds: int = 0
    num_plans: int = 0
    num_preemptions: int = 0
    num_epochs: int = 0
    prefix_tokens_hit: int = 0
    num_spread: int = 0
    num_put_off: int = 0
    num_held: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.num_seeds += other.num_seeds
        self.num_plans += other.num_plans
        self.num_preemptions += other.num_preemptions
        self.num_epochs += other.num_epochs
        self.prefix_tokens_hit += other.prefix_tokens_hit
        self.num_spread += other.num_spread
        self.num_put_off += other.num_put_off
        self.num_held += other.num_held
        self.reasons.update(other.reasons)
        self.failures += other.failures


def run_chunk(first: int, count: int) -> Tally:
    """Seeds first .. first + count - 1 in this process."""
    tally = Tally()
    for seed in range(first, first + count):
        tally.num_seeds += 1
        try:
            outcome = simulate(seed)
        except SimulationFailed as failure:
            tally.failures.append((seed, str(failure)))
            continue
        tally.num_plans += outcome.num_plans
        tally.num_preemptions += outcome.num_preemptions
        tally.num_epochs += outcome.num_epochs
        tally.prefix_tokens_hit += outcome.prefix_tokens_hit
        tally.num_spread += outcome.num_spread
        tally.num_put_off += outcome.num_put_off
        tally.num_held += outcome.num_held
        tally.reasons.update(outcome.reasons)
    return tally


def run_many(first: int, count: int, processes: int, max_failures: int = 5) -> Tally:
    """`count` seeds over several processes; stops early after `max_failures` failures."""
    total = Tally()
    for tally in _chunks(first, count, processes):
        total.add(tally)
        if len(total.failures) >= max_failures:
            break
    return total


def _chunks(first: int, count: int, processes: int) -> Iterator[Tally]:
    starts = range(first, first + count, CHUNK)
    sizes = [min(CHUNK, first + count - start) for start in starts]
    if processes == 1:
        yield from map(run_chunk, starts, sizes)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_chunk, start, size) for start, size in zip(starts, sizes, strict=True)]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one seed and print what happened")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-failures", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        try:
            print(simulate(arguments.seed))
        except SimulationFailed as failure:
            print(failure)
            return 1
        return 0
    started = time.monotonic()
    total = run_many(arguments.first, arguments.seeds, arguments.processes, arguments.max_failures)
    elapsed = time.monotonic() - started
    for _, text in total.failures[:1]:
        print(text, end="\n\n")
    for seed, text in total.failures[1:]:
        print(f"seed {seed}: {text.splitlines()[-2]}")
    print(
        f"{total.num_seeds} seeds, {len(total.failures)} failed, {elapsed:.1f} s, {1000 * elapsed / max(total.num_seeds, 1):.1f} ms each; "
        f"{total.num_plans} plans, {total.num_preemptions} preemptions, {total.num_epochs} epochs, "
        f"{total.prefix_tokens_hit} prefix tokens hit, {total.num_spread} steps with paced prefill, {total.num_put_off} without, "
        f"{total.num_held} waits for more; "
        f"ends: {dict(sorted(total.reasons.items()))}"
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
