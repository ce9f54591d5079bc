"""Decode over a list of tiles whose parts are added by teams, in the interpreter, against float64; and how many programs it has."""

import pytest
from ops import paged_case
from ops.flat_decode import both

from pagecast_kernels import configs

LENS = [1, 15, 0, 64, 65, 700, 0, 200]


@pytest.mark.parametrize(("programs", "team"), [(1, 4), (7, 2), (12, 4), (12, 2)])
def test_every_launch_is_the_same_function(programs: int, team: int) -> None:
    case = paged_case.make(programs, LENS, [1] * len(LENS), 6, 2, 64, 16)
    config = configs.Decode(tile=32, warps=4, stages=2, programs=programs, team=team)
    got, want = both(case, config)
    assert paged_case.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("team", [0, 2, 4])
def test_one_long_sequence_twice_with_one_workspace(team: int) -> None:
    case = paged_case.make(3, [900], [1], 4, 1, 64, 16)
    got, want = both(case, configs.Decode(tile=16, warps=4, stages=2, programs=12, team=team), calls=2)
    assert paged_case.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("team", [2, 4])  # five parts: two levels, and one
def test_one_tile_a_program(team: int) -> None:
    case = paged_case.make(4, [600], [1], 8, 2, 128, 16)
    got, want = both(case, configs.Decode(tile=128, warps=8, stages=2, programs=10, team=team))
    assert paged_case.relative_error(got, want) < 1e-5


@pytest.mark.parametrize(("processors", "many"), [(132, 512), (128, 512), (148, 592), (114, 456)])
def test_equal_sequences_fall_whole_to_programs_where_few_processors_stand_idle(
    monkeypatch: pytest.MonkeyPatch, processors: int, many: int
) -> None:
    monkeypatch.setattr(configs, "processors", lambda device: processors)
    assert configs.decode_flat(64, 8, 128, "cpu").programs == many
    assert configs.decode_flat(64, 3, 128, "cpu").programs == 4 * processors
    assert configs.decode_flat(1, 8, 128, "cpu").programs == many // 2
