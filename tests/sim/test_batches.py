"""Lists of class BATCH end about as soon as they would if each prompt began at once, and nobody of them waits for ever."""

from random import Random

import pytest
from sim.paces import SMALL, SMALL_GRAIN
from sim.scenario import STEP_US, RequestPlan, Scenario
from sim.world import Outcome, World

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_wire.intake import Priority

SEEDS = range(150)
MOST_REQUESTS = 16


def scenario(seed: int, priority: Priority, max_num_seqs: int, arrival_gap_us: int = 0) -> Scenario:
    """Prompts and outputs of many lengths, or all alike, that come at once or one after the other. Blocks for all."""
    random = Random(seed)
    count, alike, gap = random.randint(4, MOST_REQUESTS), random.random() < 0.3, random.choice((0, 0, 1, 4))
    tokens = random.choice((2, 8, 20))
    output = random.randint(5, 60)
    config = SchedulerConfig(
        block_size=4, num_blocks=800, max_model_len=96, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_plans_in_flight=1,
        enable_prefix_caching=False, arrival_gap_us=arrival_gap_us,
    )  # fmt: skip
    plans = tuple(
        RequestPlan(
            key=index + 1, arrival_us=index * gap * STEP_US, prompt=tuple(random.randrange(9) for _ in range(random.randint(1, tokens))),
            seed=index * 7919 + 11, namespace=0, tenant="a", priority=priority, num_sequences=1,
            max_output_tokens=output if alike else random.randint(2, 60), min_output_tokens=0, stop_ids=frozenset(),
        )
        for index in range(count)
    )  # fmt: skip
    return Scenario(seed, config, plans, latency_us=20, jitter_us=0, loss=0.0, duplication=0.0, late_results=0.0)


def both(seed: int, max_num_seqs: int) -> tuple[Outcome, Outcome]:
    return World(scenario(seed, Priority.BATCH, max_num_seqs)).run(), World(scenario(seed, Priority.NORMAL, max_num_seqs)).run()


@pytest.mark.parametrize("max_num_seqs", [MOST_REQUESTS, 5])
def test_a_batch_ends_no_later_than_a_bound_after_the_longest(max_num_seqs: int) -> None:
    """With rows for all, and with rows for a few, so that some follow others."""
    worst, spread, put_off = 0, 0, 0
    for seed in SEEDS:
        paced, prompt = both(seed, max_num_seqs)
        worst = max(worst, paced.num_plans - prompt.num_plans)
        spread += paced.num_spread
        put_off += paced.num_put_off
        assert prompt.num_spread == prompt.num_put_off == 0
    assert spread > len(SEEDS) and put_off > len(SEEDS) / 2
    waves = -(-MOST_REQUESTS // max_num_seqs)  # each may begin late where it follows another
    assert worst <= SMALL["MOST_STEPS_LATE"] * waves + SMALL_GRAIN


def test_equal_outputs_end_as_soon_as_if_each_began_at_once() -> None:
    """Whoever is put off is the last to end. Of those that come at once nobody is; one that comes alone waits for company."""
    counted = 0
    for seed in range(400):
        requests = scenario(seed, Priority.BATCH, MOST_REQUESTS).requests
        if len({request.max_output_tokens for request in requests}) > 1:
            continue
        counted += 1
        paced, prompt = both(seed, MOST_REQUESTS)
        late = SMALL["MOST_STEPS_LATE"] - 1 if requests[-1].arrival_us else 0
        assert paced.num_plans <= prompt.num_plans + late, seed
    assert counted > 100


def test_a_list_that_comes_bit_by_bit_takes_fewer_steps_where_the_first_ones_wait_for_more() -> None:
    """It ends later by no more than the idle time and what one is put off for company. Class normal knows no such wait."""
    gap, saved, worst, held = STEP_US, 0, 0, 0
    for seed in SEEDS:
        at_once, waits = (World(scenario(seed, Priority.BATCH, MOST_REQUESTS, each)).run() for each in (0, gap))
        saved += at_once.num_plans - waits.num_plans
        worst = max(worst, waits.virtual_us - at_once.virtual_us)
        held += waits.num_held
        assert at_once.num_held == 0
        if seed % 5 == 0:
            normal, unmoved = (World(scenario(seed, Priority.NORMAL, MOST_REQUESTS, each)).run() for each in (0, gap))
            assert normal == unmoved
    assert held > len(SEEDS) and saved > len(SEEDS) / 2
    assert worst <= policy.most_idle(gap) + SMALL["MOST_STEPS_LATE"] * STEP_US
