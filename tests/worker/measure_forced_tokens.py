"""What jumping over forced tokens saves: one set of requests through core and executor, with jumps and without, in the same run.

    PYTHONPATH=tests python tests/worker/measure_forced_tokens.py [--requests N] [--model GGUF] [--random-weights SHAPE] [--device cuda]

Every request asks SmolLM2 (or the model given) for a record of a fixed schema, greedily; the tokens of both ways are compared.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from worker.smollm2 import model_file

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32, view_u32, view_u64
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.intake import Submit
from pagecast_wire.sampling import Constraint, ConstraintFault, ConstraintKind, SamplingParams, StopRules
from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor
from pagecast_worker.vocabulary import load_vocabulary

FIELDS = ("first_name", "family_name", "date_of_birth", "place_of_residence", "favourite_programming_language")
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": [*FIELDS],
    "properties": {name: {"type": "string", "maxLength": 12} for name in FIELDS},
}  # fmt: skip


@contextmanager
def without_jumps(is_wanted: bool) -> Iterator[None]:
    kept = policy.FEWEST_JUMPED
    policy.FEWEST_JUMPED = 1 << 30 if is_wanted else kept
    try:
        yield
    finally:
        policy.FEWEST_JUMPED = kept


def run(executor: TorchExecutor, prompts: list[list[int]], ends: list[int], budget: int) -> tuple[dict[int, list[int]], int, float, int]:
    """Tokens by request, plans, seconds, and how many tokens were jumped."""
    core = Scheduler(
        SchedulerConfig(
            block_size=16, num_blocks=executor.cache.num_blocks, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=budget,
            max_queued_requests=1000, max_queued_tokens=1_000_000,
        ),
        epoch=1,
    )  # fmt: skip
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
    for key, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, constraint=constraint)
        core.submit(Submit(key, pack_u32(prompt), sampling, StopRules(200, 0, pack_u32(ends)), bytes(32)), 0)
    executor.start_epoch(core.start_epoch())
    for wanted in core.take_constraints():
        core.constraint_prepared(constraint_digest(wanted), ConstraintFault.NONE, 0)
    outputs: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    left, plans, began = len(prompts), 0, time.perf_counter()
    while left:
        now = int((time.perf_counter() - began) * 1e6)
        while (plan := core.plan_step(now)) is not None:
            executor.submit(plan)
            plans += 1
        core.apply_result(executor.collect(wait=True), now)
        for _, batch in core.take_batches():
            tokens = iter(view_u32(batch.tokens).tolist())
            for key, count in zip(view_u64(batch.keys).tolist(), view_u32(batch.counts).tolist(), strict=True):
                outputs[key] += [next(tokens) for _ in range(count)]
            left -= len(batch.finished)
    return outputs, plans, time.perf_counter() - began, core.state.totals.forced_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(model_file()))
    parser.add_argument("--random-weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    executor = TorchExecutor(
        WorkerConfig(
            run_dir="/unused", model=args.model, random_weights=args.random_weights, device=args.device, dtype=args.dtype, num_blocks=2000,
            max_num_seqs=64, max_model_len=512,
        )
    )  # fmt: skip
    facts, _ = executor.load(lambda progress: None)
    ends = list(facts.eos_token_ids)
    vocabulary = load_vocabulary(model_file(), 49152, [2])
    names = ("a nurse", "a baker", "a sailor", "a painter", "a judge", "a farmer", "a pilot", "a cook")
    prompts = [vocabulary.tokenize_str(f"Number {n}. A record of {names[n % len(names)]} as JSON: ") for n in range(args.requests)]
    for _ in range(args.rounds):  # the last round counts: the first one warms up
        results = {}
        for plain in (True, False):
            with without_jumps(plain):
                results[plain] = run(executor, prompts, ends, 512)
    slow, fast = results[True], results[False]
    assert slow[0] == fast[0], "the tokens differ"
    total = sum(map(len, fast[0].values()))
    print(f"{args.requests} requests, {total} output tokens, {fast[3]} of them jumped; the same tokens both ways")
    for name, (_, plans, seconds, _) in (("drawn one by one", slow), ("with jumps", fast)):
        print(f"{name:>16}: {plans} steps, {seconds:.2f} s")
    print(f"steps: {1 - fast[1] / slow[1]:.0%} fewer, time: {1 - fast[2] / slow[2]:.0%} less")
    executor.close()


if __name__ == "__main__":
    main()
