"""`python -m worker.launched_variants FOLDER`: kernels that a worker's start and serving launch but that are not compiled ahead.

FOLDER holds a config.json. Nothing is compiled or run: a launch leaves the key under which triton would keep its kernel. Runs in a
process of its own, where kernels are not interpreted. Prints a JSON object: noted, launched and missing, the last a list of names.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from triton import knobs
from triton.runtime import jit
from worker.graphs_here import MixedHere, ReplayedHere
from worker.plan_driver import Driver, Job

from pagecast_kernels import products
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.backend import cuda_operators, fold_norms
from pagecast_worker.config import WorkerConfig
from pagecast_worker.graphs import buckets, warm_sizes
from pagecast_worker.loading.random import RandomWeights
from pagecast_worker.mixed_graphs import sizes_for
from pagecast_worker.precompile import launch_all, layers_to_launch, note_launches
from pagecast_worker.sharing import sharing_for
from pagecast_worker.steps import decode_step, padded_step, prefill_step, try_sizes
from pagecast_worker.torch_executor import TorchExecutor

ROWS, BUDGET, LENGTH, BLOCKS = 256, 4096, 2048, 3000
KINDS = (
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9, seed=3), SamplingParams(temperature=0.0, num_logprobs=5),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3), SamplingParams(temperature=0.0, num_prompt_logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, num_logprobs=20),
)  # fmt: skip


def note_keys() -> set[object]:
    """From here on a launch adds its kernel's key to the set that this returns, and gives zeros where it gives tokens or their places."""
    keys: set[object] = set()

    def run(self, *args, grid, warmup, **options):
        options |= {"debug": self.debug or knobs.runtime.debug, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        bound, specialized, options = self.device_caches[0][4](*args, **options)
        values = [value if kind[0] == "constexpr" else None for value, kind in zip(bound.values(), specialized, strict=True)]
        keys.add((self.__name__, str(specialized), str(values), str(options)))
        for out in (bound.get("out_ptr"), bound.get("wanted_ptr")):
            if isinstance(out, torch.Tensor) and not out.is_meta and out.dtype in (torch.int32, torch.int64):
                out.zero_()

    jit.JITFunction.run = run
    return keys


def unfilled(x, weight, bias=None, out=None):
    """A product's place instead of the product, which is no kernel of ours."""
    return x.new_empty((x.shape[0], weight.shape[0])) if out is None else out


@torch.inference_mode()
def worker_of(folder: Path) -> TorchExecutor:
    """As on a GPU but for what runs: the same operators, over a CPU's memory."""
    config = WorkerConfig(
        run_dir="/unused", model="random", random_weights=str(folder), device="cpu", dtype="bfloat16", num_blocks=BLOCKS,
        max_num_seqs=ROWS, max_model_len=LENGTH, max_num_batched_tokens=BUDGET,
    )  # fmt: skip
    worker = TorchExecutor(config)
    worker.load(lambda progress: None)
    own = products.linear
    products.linear = lambda x, *others, **options: (own if len(x) == 1 else unfilled)(x, *others, **options)
    added = products.linear_add
    products.linear_add = lambda x, weight, residual: added(x, weight, residual) if len(x) == 1 else residual
    fold_norms(config, worker.model)
    worker.ops = cuda_operators(config, worker.model, worker.device)
    return worker


@torch.inference_mode()
def start(worker: TorchExecutor) -> tuple[ReplayedHere, MixedHere]:
    """What loading launches on a GPU; gives the graphs."""
    padding = worker.state.padding
    prefill_step(worker, BUDGET, LENGTH, ROWS, whole=True)
    prefill_step(worker, 960, 960, 1, whole=True)
    try_sizes(worker, warm_sizes(ROWS))
    sizes = buckets(ROWS, 10**10)
    decode = ReplayedHere(partial(decode_step, worker), sizes, padding, torch.device("cpu"), sharing_for(worker.model, worker.dtype))
    for size in decode.sizes:
        decode._run(size, False)
    for size in decode.shared_sizes:
        decode._run(size, True)
    mixed = MixedHere(partial(padded_step, worker), sizes_for(ROWS, BUDGET, 1, measured=True), padding)
    for size in mixed.wanted:
        mixed._run(size)
    return decode, mixed


def serve(worker: TorchExecutor, count: int) -> None:
    """So many requests of all kinds, a few more each step."""
    random = np.random.default_rng(count)
    driver = Driver(worker, BLOCKS, max_num_seqs=ROWS, max_model_len=LENGTH, budget=BUDGET)
    waiting = [Job(random.integers(3, 500, 1 + n % 90).tolist(), 4, KINDS[(n + count) % len(KINDS)]) for n in range(count)]
    while waiting or driver.rows:
        for job in [job for job in driver.rows.values() if job.done]:
            driver.release(job)
        for job in waiting[: -(-count // 3)]:
            driver.admit(job)
        del waiting[: -(-count // 3)]
        for job in [job for job in driver.rows.values() if job.computed < job.known]:
            driver.chunk(job, int(random.integers(1, 40)))
        driver.plan()


def main(folder: Path) -> None:
    """Prints what the module's docstring says."""
    torch.set_num_threads(1)
    note_launches(90, 132)  # names the GPU
    worker = worker_of(folder)
    keys = note_keys()
    shape = RandomWeights(folder, torch.device("cpu")).config
    request = {
        "shape": dataclasses.asdict(shape) | {"num_layers": layers_to_launch(shape, None)}, "dtype": "bfloat16",
        "max_blocks": LENGTH // 16, "block_size": 16, "max_num_seqs": ROWS, "max_num_batched_tokens": BUDGET, "ranks": 1,
        "quantization": None, "scheme": None, "kv_cache_dtype": "auto", "batch_invariant": False, "fold_norms": True,
        "device_name": "NVIDIA H200",
    }  # fmt: skip
    launch_all(request)
    noted = set(keys)
    keys.clear()
    graphs = start(worker)
    for worker._graphs, worker._mixed_graphs in (graphs, (None, None)):
        for count in (1, 2, 3, 7, 20, 40, 150, ROWS):
            serve(worker, count)
    missing = sorted({str(key[0]) for key in keys - noted})
    print(json.dumps({"noted": len(noted), "launched": len(keys), "missing": missing}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
