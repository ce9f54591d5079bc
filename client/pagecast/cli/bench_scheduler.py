"""`pagecast bench scheduler`: what the scheduler core costs on one core, without workers and without a model.

Every figure is the best of several rounds of a mean over many steps, because other work on the machine can only add to it.
"""

import argparse
import hashlib
import importlib.util
import sys
import types
from collections import deque
from pathlib import Path
from statistics import fmean
from time import thread_time
from typing import Any

from pagecast.bench import results
from pagecast.cli.quantities import ANY_COUNT

NUM_STEPS = 160  # ten blocks of 16 tokens: every row grows equally often
ROUNDS = 5
BLOCK_SIZE = 16
RUNNING = (64, 256, 1024)
PROMPT = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=ANY_COUNT, default=8, help="oracle ranks of the measured link; 0 leaves it out (default: 8)")
    parser.add_argument("--nano-vllm", metavar="FOLDER", help="a checkout of GeeeekExplorer/nano-vllm to measure in the same run")
    parser.add_argument("--results", metavar="FOLDER", help="write the result there too, e.g. benchmarks/results")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write --results if given. Returns the exit code."""
    results.check_folder(args.results)
    if args.nano_vllm is not None and not Path(args.nano_vllm, "nanovllm").is_dir():
        raise results.CannotWrite(f"--nano-vllm {args.nano_vllm} is no checkout of nano-vllm")
    report: dict[str, Any] = {"decode_step_us": {}, "plan_bytes": {}}
    for num_running in RUNNING:
        micros, plan_bytes = min(_decode_round(num_running) for _ in range(ROUNDS))
        report["decode_step_us"][str(num_running)] = round(micros, 1)
        print(f"decode step, {num_running:>4} running: {micros:7.1f} µs   plan {plan_bytes:6.1f} bytes on average")
        if num_running == 256:
            report["plan_bytes"]["256"] = round(plan_bytes, 1)
    report["admit_us"] = round(min(_admit_round() for _ in range(ROUNDS)), 1)
    print(f"admit a request of {PROMPT} prompt tokens, no hit: {report['admit_us']:.1f} µs")
    report["prefix_lookup_8k_us"] = round(min(_lookup_round() for _ in range(ROUNDS)), 1)
    print(f"prefix-cache lookup of 8192 tokens, all hits, hashes included: {report['prefix_lookup_8k_us']:.1f} µs")
    for ranks in sorted({1, args.ranks}) if args.ranks else ():
        from pagecast.bench import rank_link

        figures = rank_link.measure(ranks)
        report |= {f"ranks{ranks}_{name}": round(figure, 1) for name, figure in figures.items()}
        print(f"a step of {rank_link.RUNNING} decodes over {ranks} rank(s): {rank_link.described(figures)}")
    if args.nano_vllm:
        theirs = min(_nano_round(Path(args.nano_vllm), 256) for _ in range(ROUNDS))
        ratio = theirs / report["decode_step_us"]["256"]
        report["nano_vllm_step_us"], report["nano_vllm_ratio"] = {"256": round(theirs, 1)}, round(ratio, 1)
        print(f"nano-vllm, schedule, postprocess and what its engine collects, 256 running: {theirs:.1f} µs, {ratio:.1f} times ours")
    if args.results:
        print(f"written to {results.write(args.results, 'scheduler', metrics_of(report), {})}")
    return 0


def metrics_of(report: dict[str, Any]) -> dict[str, float]:
    """Dotted names for targets: scheduler.FIGURE or scheduler.FIGURE.RUNNING, and scheduler.ratio_nano_vllm."""
    metrics: dict[str, float] = {}
    for name, figure in report.items():
        name = "ratio_nano_vllm" if name == "nano_vllm_ratio" else name
        metrics |= {f"scheduler.{name}.{at}": v for at, v in figure.items()} if isinstance(figure, dict) else {f"scheduler.{name}": figure}
    return metrics


def _scheduler(max_num_seqs: int, num_blocks: int, max_model_len: int = 4096) -> Any:
    from pagecast_scheduler.core.config import SchedulerConfig
    from pagecast_scheduler.core.scheduler import Scheduler

    config = SchedulerConfig(
        block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 20, max_queued_requests=1 << 20, max_queued_tokens=1 << 30,
    )  # fmt: skip
    return Scheduler(config, epoch=1)


def _submit(key: int, tokens: Any, max_output: int) -> Any:
    from pagecast_wire.codec import pack_u32
    from pagecast_wire.intake import KEY_BITS, Submit
    from pagecast_wire.sampling import SamplingParams, StopRules

    stop = StopRules(max_output, 0, pack_u32([2]))
    return Submit(
        key=(1 << KEY_BITS) | key, prompt=pack_u32(tokens), sampling=SamplingParams(seed=key), stop=stop, cache_namespace=bytes(32)
    )  # fmt: skip


def _decode_round(num_running: int) -> tuple[float, float]:
    """(mean µs, mean plan bytes) per decode step with two plans in flight, prompt lengths at uniform offsets within a block."""
    import numpy as np

    from pagecast_wire.codec import decode, encode, pack_u32
    from pagecast_wire.result import StepResult

    rng = np.random.default_rng(1)
    scheduler = _scheduler(num_running, num_running * 40)
    for key in range(num_running):
        prompt = rng.integers(10, 32000, PROMPT // 2 + key % BLOCK_SIZE)
        scheduler.submit(_submit(key, prompt, 400), 0)
    tokens, flags = pack_u32(rng.integers(10, 32000, num_running)), bytes(num_running)
    waiting = deque([scheduler.plan_step(0).step])
    spent, sizes = [], []
    for step in range(NUM_STEPS + 20):
        result = encode(StepResult(1, step + 1, 0, tokens, flags))
        began = thread_time()
        plan = scheduler.plan_step(step * 1000)
        plan_bytes = encode(plan)
        scheduler.apply_result(decode(result, "from_worker"), step * 1000)
        batches = [encode(batch) for _, batch in scheduler.take_batches()]
        spent.append(thread_time() - began)
        waiting.append(plan.step)
        sizes.append(len(plan_bytes))
        assert batches
    return fmean(spent[20:]) * 1e6, fmean(sizes[20:])


def _admit_round() -> float:
    """Mean µs from Submit to the plan that holds it, one request at a time, fresh tokens each."""
    import numpy as np

    from pagecast_wire.codec import encode, pack_u32
    from pagecast_wire.result import StepResult

    rng = np.random.default_rng(2)
    scheduler = _scheduler(256, 256 * 40)
    requests = [_submit(key, rng.integers(10, 32000, PROMPT), 400) for key in range(200)]
    spent = []
    for step, submit in enumerate(requests, start=1):
        began = thread_time()
        scheduler.submit(submit, step)
        encode(scheduler.plan_step(step))
        spent.append(thread_time() - began)
        tokens = pack_u32(np.full(step, 7))
        scheduler.apply_result(StepResult(1, step, 0, tokens, bytes(step)), step)
        scheduler.take_batches()
    return fmean(spent[20:]) * 1e6


def _lookup_round() -> float:
    """µs to hash and find 8192 tokens that are all cached."""
    import numpy as np

    from pagecast_scheduler.core.prefix_cache import HashChain

    rng = np.random.default_rng(3)
    scheduler = _scheduler(4, 1024, max_model_len=16384)
    prompt = rng.integers(10, 32000, 8193).astype(np.uint32)
    scheduler.submit(_submit(0, prompt, 4), 0)
    scheduler.plan_step(0)
    kv = scheduler.state.kv
    chain = HashChain(bytes(32), BLOCK_SIZE)
    began = thread_time()
    hits = kv.lookup(chain, prompt, len(prompt))
    spent = thread_time() - began
    assert len(hits) * BLOCK_SIZE == 8192
    return spent * 1e6


def _nano_round(checkout: Path, num_running: int) -> float:
    """Mean µs per decode step of nano-vllm's scheduler at the same load: schedule(), postprocess() and the two lines around them in
    LLMEngine.step that count tokens and collect what finished. Nothing is sent anywhere, unlike in ours."""
    modules = _load_nano(checkout)
    scheduler_module, sequence = modules["scheduler"], modules["sequence"]
    sampling = modules["sampling_params"].SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
    config = types.SimpleNamespace(
        max_num_seqs=num_running, max_num_batched_tokens=1 << 20, eos=2, num_kvcache_blocks=num_running * 40,
        kvcache_block_size=sequence.Sequence.block_size,
    )  # fmt: skip
    scheduler = scheduler_module.Scheduler(config)
    for key in range(num_running):
        scheduler.add(sequence.Sequence([10 + key] * (PROMPT // 2 + key % BLOCK_SIZE), sampling))
    spent = []
    for _ in range(NUM_STEPS + 20):
        began = thread_time()
        scheduled, is_prefill = scheduler.schedule()
        picked = thread_time() - began
        tokens = [7] * len(scheduled)
        began = thread_time()
        _postprocess(scheduler, scheduled, tokens, is_prefill)
        finished = [(seq.seq_id, seq.completion_token_ids) for seq in scheduled if seq.is_finished]
        assert not finished
        spent.append(picked + thread_time() - began)
    return fmean(spent[20:]) * 1e6


def _postprocess(scheduler: Any, scheduled: Any, tokens: list[int], is_prefill: bool) -> None:
    """Its versions differ in whether the phase is an argument."""
    takes_phase = scheduler.postprocess.__code__.co_argcount > 3
    scheduler.postprocess(scheduled, tokens, is_prefill) if takes_phase else scheduler.postprocess(scheduled, tokens)


def _load_nano(checkout: Path) -> dict[str, Any]:
    """Its scheduler's modules by file, so that neither its package's imports nor torch are needed."""
    root = checkout / "nanovllm"
    if "xxhash" not in sys.modules and importlib.util.find_spec("xxhash") is None:
        xxhash = types.ModuleType("xxhash")  # it hashes one block in 256 steps: which hash does not show in the mean
        xxhash.xxh64 = _ShortHash  # type: ignore[attr-defined]
        sys.modules["xxhash"] = xxhash
    for name in ("nanovllm", "nanovllm.engine"):
        sys.modules.setdefault(name, types.ModuleType(name))
    config = types.ModuleType("nanovllm.config")
    config.Config = object  # type: ignore[attr-defined]
    sys.modules.setdefault("nanovllm.config", config)
    loaded: dict[str, Any] = {}
    for path in ("sampling_params", "engine/sequence", "engine/block_manager", "engine/scheduler"):
        name = "nanovllm." + path.replace("/", ".")
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, root / f"{path}.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        loaded[path.rsplit("/", 1)[-1]] = sys.modules[name]
    return loaded


class _ShortHash:
    """The part of xxhash.xxh64 that is used, where that package is not installed."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._hash.digest(), "little")
