"""Where the time of a decode step goes: `python -m pagecast_worker.profile_step FOLDER [--batch 1 256] [--context 512]`.

FOLDER holds a config.json; weights are made up. Prints milliseconds per step with and without a graph, on the host, and per part
and per kernel. Works on a CPU too, without graphs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile

from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.torch_executor import TorchExecutor


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder with a config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, default=512, help="tokens each sequence holds")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fold-norms", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of tables")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as run_dir:
        executor = TorchExecutor(
            WorkerConfig(
                run_dir=run_dir, model="random", random_weights=options.folder, device=options.device, dtype=options.dtype,
                max_num_seqs=max(options.batch), max_model_len=2 * options.context + 2048, cpu_kv_gib=2.0,
                fold_norms=options.fold_norms,
            )
        )
        began = time.perf_counter()
        facts, num_blocks = executor.load(lambda progress: None)
    seconds, billions = time.perf_counter() - began, facts.num_parameters / 1e9
    print(f"loaded in {seconds:.1f} s: {billions:.2f} B parameters, {facts.dtype}, {num_blocks} blocks")
    for batch in options.batch:
        figures = measure(executor, num_blocks, batch, options.context, options.steps)
        print(json.dumps(figures) if options.json else table(figures))
    executor.close()
    return 0


def measure(executor: TorchExecutor, num_blocks: int, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Step times in ms for `batch` sequences of `context` tokens, and the parts of a step run without a graph."""
    session = Session(executor, num_blocks, batch, context)
    figures: dict[str, Any] = {"batch": batch, "context": context}
    session.run(5)
    figures["step_ms"] = 1e3 * session.run(steps)
    figures["host_submit_ms"] = 1e3 * session.host_seconds
    figures["step_k8_ms"] = 1e3 * session.run(max(steps // 8, 1), num_steps=8) / 8
    graphs, executor._graphs = executor._graphs, None
    session.run(2)
    figures["eager_step_ms"] = 1e3 * session.run(10)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if executor.device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        session.run(5)
    figures["parts_ms"] = kernel_times(profiler, executor.device.type, 5)
    executor._graphs = graphs
    return figures


class Session:
    """Sequences of made-up tokens that decode for ever, two plans in flight as when serving."""

    def __init__(self, executor: TorchExecutor, num_blocks: int, batch: int, context: int) -> None:
        self.executor = executor
        self.batch = batch
        self.host_seconds = 0.0
        limit, config = executor.max_model_len, executor.config
        executor.start_epoch(StartEpoch(1, num_blocks, config.block_size, config.max_num_seqs, limit, config.max_num_batched_tokens))
        self._step = 0
        self._in_flight = 0
        self._prefill(num_blocks, context, limit)

    def _prefill(self, num_blocks: int, context: int, limit: int) -> None:
        size, budget = self.executor.config.block_size, self.executor.config.max_num_batched_tokens
        each = min(-(-limit // size), (num_blocks - 1) // self.batch)
        tokens = np.random.default_rng(0).integers(10, self.executor.model.config.vocab_size, context)
        for row in range(self.batch):
            blocks = np.arange(1 + row * each, 1 + (row + 1) * each)
            admission = Admission(
                row=row, tokens=pack_u32(tokens), num_prompt_tokens=context, blocks=pack_u32(blocks), num_computed_tokens=0,
                max_tokens=each * size, min_tokens=0, stop_token_ids=b"", sampling=SamplingParams(temperature=1.0, seed=row),
            )
            for start in range(0, context, budget):
                length = min(budget, context - start)
                self._submit(
                    admissions=(admission,) if start == 0 else (), chunk_rows=pack_u32([row]), chunk_starts=pack_u32([start]),
                    chunk_lengths=pack_u32([length]), paused=pack_u32(range(row)),
                )
                self.executor.collect(wait=True)
                self._in_flight -= 1

    def _submit(self, **columns: Any) -> None:
        self._step += 1
        self._in_flight += 1
        self.executor.submit(StepPlan(1, self._step, **columns))

    def run(self, plans: int, num_steps: int = 1) -> float:
        """Seconds per plan; afterwards host_seconds is the part of it that submitting took."""
        host = 0.0
        began = time.perf_counter()
        for _ in range(plans):
            start = time.perf_counter()
            self._submit(num_steps=num_steps)
            host += time.perf_counter() - start
            while self._in_flight > 1:
                self.executor.collect(wait=True)
                self._in_flight -= 1
        while self._in_flight:
            self.executor.collect(wait=True)
            self._in_flight -= 1
        self.host_seconds = host / plans
        return (time.perf_counter() - began) / plans


def kernel_times(profiler: Any, device: str, steps: int) -> dict[str, float]:
    """Milliseconds per step of each kernel (on a CPU: each operator), largest first, and their sum."""
    spent: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        micros = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if micros > 0:
            spent[event.key[:70]] += micros / 1e3 / steps
    ordered = dict(sorted(spent.items(), key=lambda item: -item[1])[:18])
    return {"total": sum(spent.values()), **ordered}


def table(figures: dict[str, Any]) -> str:
    lines = [f"batch {figures['batch']}, context {figures['context']}"]
    lines += [f"  {name:<28} {value:9.3f}" for name, value in figures.items() if name.endswith("_ms") and name != "parts_ms"]
    lines += [f"    {value:9.3f}  {name}" for name, value in figures["parts_ms"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LoadError as error:
        sys.exit(f"profile_step: {error}")
