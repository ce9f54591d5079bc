"""The scheduler core drives the worker's oracle over plans in flight, with checksums: every token is the predicted one."""

import random
from collections import deque

import numpy as np
import pytest

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32, view_u32, view_u64
from pagecast_wire.constraints import constraint_digest
from pagecast_wire.intake import KEY_BITS, Accepted, Submit
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint, ConstraintFault, ConstraintKind, SamplingParams, StopRules
from pagecast_worker.config import WorkerConfig
from pagecast_worker.oracle import OracleExecutor, oracle_tokens
from pagecast_worker.oracle_logprobs import oracle_logprobs


def f32(column: bytes) -> list[float]:
    return np.frombuffer(column, "<f4").tolist()


class Run:
    """Thirty requests through core and oracle, without sockets and processes."""

    def __init__(self, seed: int, max_steps_per_plan: int) -> None:
        rng = self.rng = random.Random(seed)
        vocab_size = rng.choice((20, 49152))
        self.core = Scheduler(
            SchedulerConfig(
                block_size=16, num_blocks=rng.choice((20, 40, 200)), max_model_len=256, max_num_seqs=rng.choice((4, 16)),
                max_num_batched_tokens=rng.choice((32, 64, 512)), max_queued_requests=100, max_queued_tokens=1_000_000,
                max_steps_per_plan=max_steps_per_plan, table_checksums=True,
            ),
            epoch=1,
        )
        self.executor = OracleExecutor(WorkerConfig(run_dir="/nowhere", model="oracle", executor="oracle", oracle_vocab_size=vocab_size))
        self.executor.start_epoch(self.core.start_epoch())
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.told: dict[int, list[tuple[float, list[int], list[float]]]] = {}
        self.prompt_told: dict[int, list[tuple[float, list[int], list[float]]]] = {}
        self.submitted: dict[int, Submit] = {}
        self.vocab_size = vocab_size
        self.finished: set[int] = set()
        stem = [rng.randrange(vocab_size) for _ in range(100)]
        for index in range(30):
            prompt = stem[: rng.randint(0, 100)] + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
            length, stops = rng.randint(1, 60), rng.sample(range(vocab_size), rng.randint(0, 2))
            self.submit(1 << KEY_BITS | index, prompt, StopRules(length, rng.choice((0, min(5, length))), pack_u32(stops)), vocab_size)

    def submit(self, key: int, prompt: list[int], stop: StopRules, vocab_size: int) -> None:
        sampling = SamplingParams(
            seed=key, num_logprobs=self.rng.choice((-1, -1, 0, 3)), num_prompt_logprobs=self.rng.choice((-1, -1, -1, 0, 2)),
            constraint=self.rng.choice((None, Constraint(ConstraintKind.JSON_OBJECT))),
        )
        request = Submit(key=key, prompt=pack_u32(prompt), sampling=sampling, stop=stop, cache_namespace=bytes(32))
        self.submitted[key], self.told[key], self.prompt_told[key] = request, [], []
        assert isinstance(self.core.submit(request, 0), Accepted)
        stops = view_u32(stop.stop_token_ids).tolist()
        self.expected[key] = oracle_tokens(
            prompt, stop.max_output_tokens, key, 0, vocab_size, stops, stop.min_output_tokens, sampling.constraint is not None
        )
        self.received[key] = []

    def until_done(self) -> None:
        for constraint in self.core.take_constraints():
            self.core.constraint_prepared(constraint_digest(constraint), ConstraintFault.NONE, 500)
        in_flight: deque[StepResult] = deque()
        for now in range(1000, 20_000_000, 1000):
            plan = self.core.plan_step(now)
            if plan is not None:
                self.executor.submit(plan)
                result = self.executor.collect(wait=True)
                assert result is not None
                in_flight.append(result)
            if in_flight and (plan is None or self.rng.random() < 0.6):
                self.core.apply_result(in_flight.popleft(), now)
            self.take_batches()
            if len(self.finished) == len(self.expected):
                return
        raise AssertionError("the requests do not come to an end")

    def take_batches(self) -> None:
        for _, batch in self.core.take_batches():
            tokens = iter(view_u32(batch.tokens).tolist())
            keys, offsets, counts = view_u64(batch.keys).tolist(), view_u32(batch.offsets).tolist(), view_u32(batch.counts).tolist()
            for key, offset, count in zip(keys, offsets, counts, strict=True):
                assert offset == len(self.received[key])
                self.received[key] += [next(tokens) for _ in range(count)]
            for told in batch.logprobs:
                assert told.offset == len(self.told[told.key]) and told.offset < len(self.received[told.key])
                self.told[told.key].append((told.logprob, view_u32(told.top_ids).tolist(), f32(told.top_logprobs)))
            for part in batch.prompt_logprobs:
                assert part.start == 1 + len(self.prompt_told[part.key]) and len(self.received[part.key]) <= 1
                values, num = f32(part.logprobs), part.num_top
                ids, best = view_u32(part.top_ids).tolist(), f32(part.top_logprobs)
                assert len(ids) == len(best) == num * len(values)
                self.prompt_told[part.key] += [
                    (value, ids[at * num : (at + 1) * num], best[at * num : (at + 1) * num]) for at, value in enumerate(values)
                ]
            self.finished |= {end.key for end in batch.finished}


@pytest.mark.parametrize("max_steps_per_plan", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_the_core_s_plans_give_the_predicted_tokens(seed: int, max_steps_per_plan: int) -> None:
    run = Run(seed, max_steps_per_plan)
    run.until_done()
    assert run.received == run.expected
    assert run.core.state.totals.forced_tokens > 20
    for key, request in run.submitted.items():
        num, num_prompt = request.sampling.num_logprobs, request.sampling.num_prompt_logprobs
        output, prompt = run.received[key] if num >= 0 else [], view_u32(request.prompt).tolist()[1:] if num_prompt >= 0 else []
        assert run.told[key] == [oracle_logprobs(token, num, run.vocab_size) for token in output]
        assert run.prompt_told[key] == [oracle_logprobs(token, num_prompt, run.vocab_size) for token in prompt]
