"""Every planted bug is caught within 2,000 seeds; the core without a bug is not."""

import pytest
import sim.planted_output  # noqa: F401 - puts its mutations into the list
from sim.planted import MUTATIONS, Mutation, colliding_digests, planted
from sim.world import SimulationFailed, simulate

MAX_SEEDS = 2000
NUM_CONTROL_SEEDS = 500


def first_catch(bug: Mutation) -> SimulationFailed | None:
    """The failure of the first seed that shows the bug."""
    with planted(bug.apply):
        for seed in range(MAX_SEEDS):
            try:
                simulate(seed)
            except SimulationFailed as failure:
                return failure
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", MUTATIONS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Mutation) -> None:
    caught = first_catch(bug)
    assert caught is not None, f"{bug.name} ({bug.apply.__doc__}) survived {MAX_SEEDS} seeds"
    simulate(caught.seed)  # without the bug the same seed passes


def test_enough_bugs_are_planted() -> None:
    assert len(MUTATIONS) >= 20


def test_nothing_is_caught_without_a_bug() -> None:
    for seed in range(NUM_CONTROL_SEEDS):
        simulate(seed)


def test_colliding_digests_are_harmless() -> None:
    """The control of `token_ids_not_compared`: the collisions alone change nothing."""
    with planted(colliding_digests):
        for seed in range(NUM_CONTROL_SEEDS):
            simulate(seed)
