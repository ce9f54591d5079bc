"""Ten thousand whole-system runs, and what the simulator itself must be able to do."""

import os

import pytest
from sim.run import run_many
from sim.scenario import FEATURES, draw
from sim.world import World, simulate

NUM_SEEDS = int(os.environ.get("PAGECAST_SIM_SEEDS", "10000"))


@pytest.mark.timeout(1500)
def test_every_seed_holds_every_law() -> None:
    total = run_many(0, NUM_SEEDS, processes=os.cpu_count() or 1)
    assert not total.failures, total.failures[0][1]
    assert total.num_seeds == NUM_SEEDS
    assert total.num_preemptions > NUM_SEEDS / 100, "scenarios must preempt"
    assert total.num_epochs > NUM_SEEDS, "scenarios must lose workers"
    assert total.prefix_tokens_hit > NUM_SEEDS, "scenarios must hit the prefix cache"
    rare = {"STOP", "LENGTH", "TIME_LIMIT", "CANCELLED", "DEADLINE_EXCEEDED", "QUEUE_TIME_EXCEEDED", "NUMERIC_FAULT", "POISON_REQUEST"}
    assert rare <= set(total.reasons), "every way to end must have been met"


def test_one_seed_is_one_run() -> None:
    """Replaying a seed must show the same failure: nothing but the seed decides what happens."""
    for seed in range(20):
        first, second = World(draw(seed)), World(draw(seed))
        assert first.run() == second.run()
        assert list(map(str, first.trace)) == list(map(str, second.trace))


def test_scenarios_have_every_feature() -> None:
    seen = {feature for seed in range(300) for feature in draw(seed).features}
    assert seen == set(FEATURES)


def test_simulate_reports_numbers() -> None:
    outcome = simulate(1)
    assert outcome.num_plans > 0
    assert outcome.reasons
