"""The oracle under random legal plans gives exactly the tokens that oracle_tokens predicts; under wrong ones it does not."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.oracle_planner import Job, Planner, make_jobs

from pagecast_wire.checksum import table_checksum
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.result import FLAG_STOP
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.config import ConfigError, WorkerConfig
from pagecast_worker.executor import PlanError
from pagecast_worker.oracle import OracleExecutor, oracle_tokens


def opened(vocab_size: int = 49152, num_blocks: int = 200, block_size: int = 16, rows: int = 6) -> tuple[OracleExecutor, StartEpoch]:
    config = WorkerConfig(run_dir="/nowhere", model="oracle", executor="oracle", oracle_vocab_size=vocab_size, max_model_len=256)
    executor = OracleExecutor(config)
    start = StartEpoch(1, num_blocks, block_size, rows, 256, 2048)
    executor.start_epoch(start)
    return executor, start


def expected(job: Job, vocab_size: int) -> list[int]:
    return oracle_tokens(job.prompt, job.limit, job.seed, job.sequence, vocab_size, job.stops, job.minimum)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=st.sampled_from((3, 40, 49152)), block_size=st.sampled_from((16, 32)))
def test_any_legal_schedule_gives_the_same_tokens(seed: int, vocab_size: int, block_size: int) -> None:
    rng = random.Random(seed)
    executor, start = opened(vocab_size, num_blocks=150, block_size=block_size)
    jobs = make_jobs(rng, 8, vocab_size)
    planner = Planner(rng, jobs, start)
    while not all(job.done for job in jobs):
        assert planner.step < 3000, "the jobs do not come to an end"
        executor.submit(planner.plan())
        result = executor.collect(wait=True)
        assert result is not None and result.step == planner.step
        planner.apply(result)
    for job in jobs:
        assert job.output == expected(job, vocab_size)
    shares = executor.cells.shares.copy()
    executor.cells.write(np.arange(len(executor.cells.cells)), executor.cells.cells.copy())
    assert (executor.cells.shares == shares).all()


def admission(row: int, tokens: list[int], blocks: list[int], **changes: object) -> Admission:
    values: dict[str, object] = {
        "row": row, "tokens": pack_u32(tokens), "num_prompt_tokens": len(tokens), "blocks": pack_u32(blocks), "num_computed_tokens": 0,
        "max_tokens": 200, "min_tokens": 0, "stop_token_ids": b"", "sampling": SamplingParams(),
    }
    return Admission(**(values | changes))  # type: ignore[arg-type]


def prefill(step: int, row: int, tokens: list[int], blocks: list[int], start: int = 0, **changes: object) -> StepPlan:
    return StepPlan(
        epoch=1, step=step, admissions=(admission(row, tokens, blocks, num_computed_tokens=start),), chunk_rows=pack_u32([row]),
        chunk_starts=pack_u32([start]), chunk_lengths=pack_u32([len(tokens) - start]), **changes,  # type: ignore[arg-type]
    )


def tokens_of(executor: OracleExecutor, plan: StepPlan) -> list[int]:
    executor.submit(plan)
    result = executor.collect(wait=True)
    assert result is not None
    return view_u32(result.tokens).tolist()


PROMPT = list(range(100, 140))


def test_a_prefix_of_other_tokens_changes_the_next_token() -> None:
    executor, _ = opened()
    right = oracle_tokens(PROMPT, 1)
    assert tokens_of(executor, prefill(1, 0, PROMPT, [1, 2, 3])) == right
    assert tokens_of(executor, prefill(2, 1, PROMPT, [1, 2, 4], start=32, paused=pack_u32([0]))) == right
    other = [7, *PROMPT[1:]]  # block 2 holds the same tokens as this one's second block, but behind another first block
    assert tokens_of(executor, prefill(3, 2, other, [5, 6, 7], paused=pack_u32([0, 1]))) == oracle_tokens(other, 1)
    wrong = tokens_of(executor, prefill(4, 3, other, [5, 2, 8], start=32, paused=pack_u32([0, 1, 2])))
    assert wrong != oracle_tokens(other, 1)


@pytest.mark.parametrize("table", [[2, 1, 3], [1, 9, 3], [9, 2, 3]], ids=["swapped", "stale", "never written"])
def test_a_wrong_block_table_changes_the_next_token(table: list[int]) -> None:
    executor, _ = opened()
    tokens_of(executor, prefill(1, 0, PROMPT, [1, 2, 3]))
    tokens_of(executor, prefill(2, 1, PROMPT[::-1], [9, 10, 11] if 9 in table[1:] else [12, 10, 11], paused=pack_u32([0])))
    executor.table[0, :3] = table
    assert tokens_of(executor, StepPlan(epoch=1, step=3, paused=pack_u32([1]))) != oracle_tokens(PROMPT, 2)[1:]


def test_a_block_given_away_too_early_changes_the_next_token() -> None:
    executor, _ = opened()
    tokens_of(executor, prefill(1, 0, PROMPT, [1, 2, 3]))
    tokens_of(executor, prefill(2, 1, PROMPT[::-1], [9, 1, 11], paused=pack_u32([0])))  # block 1 still belongs to row 0
    assert tokens_of(executor, StepPlan(epoch=1, step=3, paused=pack_u32([1]))) != oracle_tokens(PROMPT, 2)[1:]


def test_copied_blocks_stand_in_for_their_sources() -> None:
    executor, _ = opened()
    tokens_of(executor, prefill(1, 0, PROMPT, [1, 2, 3]))
    executor.table[0, 0] = 20
    plan = StepPlan(epoch=1, step=2, copy_from=pack_u32([1]), copy_to=pack_u32([20]))
    assert tokens_of(executor, plan) == oracle_tokens(PROMPT, 2)[1:]


def test_rows_of_one_plan_may_share_blocks_that_the_plan_itself_fills() -> None:
    executor, _ = opened()
    plan = StepPlan(
        epoch=1, step=1,
        admissions=(admission(0, PROMPT, [1, 2, 4], num_computed_tokens=32), admission(1, PROMPT[:35], [1, 2, 3])),
        chunk_rows=pack_u32([0, 1]), chunk_starts=pack_u32([32, 0]), chunk_lengths=pack_u32([8, 35]),
    )
    assert tokens_of(executor, plan) == oracle_tokens(PROMPT, 1) + oracle_tokens(PROMPT[:35], 1)


def test_the_checksum_in_a_plan_is_compared() -> None:
    executor, _ = opened()
    plan = prefill(1, 2, PROMPT, [1, 2, 3])
    twin, _ = opened()
    tokens_of(twin, plan)
    right = table_checksum([(2, len(PROMPT), [1, 2, 3])])
    assert twin.checksum() == table_checksum([(2, len(PROMPT) + 1, [1, 2, 3])])
    tokens_of(executor, prefill(1, 2, PROMPT, [1, 2, 3], table_checksum=right))
    fresh, _ = opened()
    with pytest.raises(PlanError, match="differ"):
        fresh.submit(prefill(1, 2, PROMPT, [1, 3, 2], table_checksum=right))


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(epoch=1, step=1, released=pack_u32([1])),
        StepPlan(epoch=1, step=1, released=pack_u32([99])),
        StepPlan(epoch=1, step=1, grown_rows=pack_u32([0]), grown_blocks=pack_u32([4])),
        prefill(1, 0, PROMPT, [1, 2]),
        prefill(1, 0, PROMPT, [1, 2, 0]),
        prefill(1, 0, PROMPT, [1, 2, 200]),
        prefill(1, 6, PROMPT, [1, 2, 3]),
    ],
    ids=["empty row", "row out of range", "growth of an empty row", "too few blocks", "null block", "no such block", "no such row"],
)
def test_contradictory_plans_are_refused(plan: StepPlan) -> None:
    executor, _ = opened()
    with pytest.raises(PlanError):
        executor.submit(plan)


def test_stop_ids_end_and_min_tokens_hold_them_back() -> None:
    first = oracle_tokens(PROMPT, 3)
    assert oracle_tokens(PROMPT, 3, stop_ids=(first[1],)) == first[:2]
    held = oracle_tokens(PROMPT, 3, stop_ids=(first[0],), min_tokens=1)
    assert held[0] == first[0] + 1
    executor, _ = opened()
    stops = {"stop_token_ids": pack_u32([first[1]])}
    plan = StepPlan(
        epoch=1, step=1, admissions=(admission(0, PROMPT, [1, 2, 3], **stops),),
        chunk_rows=pack_u32([0]), chunk_starts=pack_u32([0]), chunk_lengths=pack_u32([40]),
    )
    tokens_of(executor, plan)
    executor.submit(StepPlan(epoch=1, step=2))
    result = executor.collect(wait=True)
    assert result is not None and result.flags == bytes([FLAG_STOP]) and view_u32(result.tokens).tolist() == [first[1]]


def test_a_continued_history_and_another_seed_or_sequence() -> None:
    whole = oracle_tokens(PROMPT, 12)
    assert oracle_tokens(PROMPT + whole[:5], 7) == whole[5:]
    assert len({tuple(oracle_tokens(PROMPT, 3, seed, sequence)) for seed in (0, 1) for sequence in (0, 1)}) == 4


def test_results_wait_for_the_modelled_device() -> None:
    config = WorkerConfig(run_dir="/nowhere", model="oracle", executor="oracle", max_model_len=256, oracle_step_us=50_000)
    executor = OracleExecutor(config)
    executor.start_epoch(StartEpoch(1, 200, 16, 6, 256, 2048))
    executor.submit(prefill(1, 0, PROMPT, [1, 2, 3]))
    executor.submit(StepPlan(epoch=1, step=2))
    assert executor.collect(wait=False) is None
    results = [executor.collect(wait=True), executor.collect(wait=True)]
    assert [result.step for result in results if result] == [1, 2]
    assert executor.collect(wait=True) is None


def test_options_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="rank must be below tensor_parallel_size 2, got 2"):
        WorkerConfig(run_dir="/nowhere", model="m", rank=2, tensor_parallel_size=2)
