"""How much KV memory lies idle inside allocated blocks, with the `chat` lengths of the fixed workloads."""

import numpy as np

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32
from pagecast_wire.intake import Submit
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import SamplingParams, StopRules

MAX_MODEL_LEN = 4096
NUM_REQUESTS = 500


def chat_lengths(count):
    """(prompt, output) lengths: log-normal around 220 and 200 tokens, as the `chat` workload draws them."""
    rng = np.random.default_rng(20261129)

    def draw(n, mean, sigma, low, high):
        return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n), low, high).astype(int)

    return list(zip(draw(1000, 220, 1.0, 4, 2048).tolist(), draw(1000, 200, 0.7, 4, 1024).tolist(), strict=True))[:count]


def run_chat():
    """Slots allocated, slots with KV computed, tokens planned, and what one contiguous region per request would take; summed over steps."""
    config = SchedulerConfig(
        block_size=16, num_blocks=8192, max_model_len=MAX_MODEL_LEN, max_num_seqs=128, max_num_batched_tokens=2048,
    )  # fmt: skip
    scheduler = Scheduler(config, epoch=1)
    rng = np.random.default_rng(1)
    for key, (prompt, output) in enumerate(chat_lengths(NUM_REQUESTS)):
        tokens = pack_u32(rng.integers(10, 32000, prompt))
        scheduler.submit(Submit(key, tokens, SamplingParams(), StopRules(output), bytes(32)), 0)
    state, rows = scheduler.state, scheduler.state.rows
    sums = np.zeros(4, np.int64)
    while state.requests:
        while scheduler.plan_step(0) is not None:
            pass
        record = state.in_flight[0]
        active = np.array([seq.row for seq in rows.running()], np.int64)
        allocated = int(state.kv.table.num_blocks[active].sum()) * 16
        computed = np.where(rows.decoding[active], rows.num_tokens[active] - 1, rows.num_computed[active])
        planned = np.where(rows.decoding[active], rows.num_planned[active], rows.num_computed[active])
        sums += allocated, int(computed.sum()), int(planned.sum()), len(active) * MAX_MODEL_LEN
        width = len(record.cohort.rows)
        scheduler.apply_result(StepResult(1, record.step, 0, bytes(4 * width), bytes(width)), 0)
        scheduler.take_batches()
    assert scheduler.stats().num_blocks_referenced == 0
    return sums.tolist()


def test_waste_with_chat_lengths(capsys):
    allocated, computed, planned, contiguous = run_chat()
    waste, planned_waste = 1 - computed / allocated, 1 - planned / allocated
    with capsys.disabled():
        print(
            f"\nKV memory idle inside what is allocated, {NUM_REQUESTS} chat requests, block 16: {waste:.2%}; "
            f"planned tokens counted as filled {planned_waste:.2%}; "
            f"contiguous regions of {MAX_MODEL_LEN} tokens {1 - computed / contiguous:.1%}"
        )
    assert waste <= 0.03
    assert planned_waste <= 0.02
