"""Who adds up what programs leave of a sequence (shares.team_of, as latent_hopper._arrive goes by it), whatever order they come in."""

import random

import pytest
import torch
import triton
import triton.language as tl

from pagecast_kernels.shares import owner, share_of, team_of


@triton.jit
def _plan(plan_ptr, starts_ptr, lens_ptr, tiles, COUNT: tl.constexpr, TEAM: tl.constexpr):
    """plan [programs, sequences, 5]: first and last program, low, high, slot; -1 where the program leaves no part of a sequence."""
    program = tl.program_id(0)
    begin, end, share, extra = share_of(program, tl.num_programs(0), tiles)
    for place in range(COUNT):
        start, own = tl.load(starts_ptr + place), tl.load(lens_ptr + place)
        if (own > 0) & (start < end) & (start + own > begin) & ((start < begin) | (start + own > end)):
            first, last = owner(start, share, extra), owner(start + own - 1, share, extra)
            low, high, slot = team_of(program, first, last, TEAM)
            into = plan_ptr + (program * COUNT + place) * 5
            tl.store(into, first)
            tl.store(into + 1, last)
            tl.store(into + 2, low)
            tl.store(into + 3, high)
            tl.store(into + 4, slot)


def _parts(plan: torch.Tensor, place: int, low: int, high: int, step: int, left: dict[int, set[int]]) -> set[int]:
    """What _add_parts finds in the slots that it reads, each of which must hold something."""
    first_program, found = int(plan[low, place, 0]), set()
    for start in range(low // step, high // step + 1):
        program = max(start * step, first_program)
        part = left[2 * program + (program == first_program)]
        assert not found & part
        found |= part
    return found


@pytest.mark.parametrize("team", [2, 8])
@pytest.mark.parametrize(("programs", "tiles"), [
    (132, [512]), (128, [5, 2, 500, 0, 1, 1]), (128, [64] * 8), (128, [0, 200, 300, 0, 90, 1]), (7, [1, 2]), (24, [40, 7, 41, 0, 3]),
    (17, [17]), (9, [16, 2]),
])  # fmt: skip
def test_all_parts_are_added_once(programs: int, tiles: list[int], team: int) -> None:
    lens = torch.tensor(tiles, dtype=torch.int32)
    starts = (lens.cumsum(0) - lens).to(torch.int32)
    plan = torch.full((programs, len(tiles), 5), -1, dtype=torch.int32)
    _plan[(programs,)](plan, starts, lens, sum(tiles), len(tiles), team)
    share, extra = divmod(sum(tiles), programs)
    held = {place: {p for p in range(programs) if plan[p, place, 0] >= 0} for place in range(len(tiles))}
    for seed in range(20):
        random.seed(seed)
        arrivals = [(p, place) for place in held for p in held[place]]
        random.shuffle(arrivals)
        counters, teams, left, written = [0] * len(tiles), [0] * (2 * programs), {}, {}
        for program, place in arrivals:
            first, last, low, high, slot = plan[program, place].tolist()
            own = 2 * program + (int(starts[place]) >= program * share + min(program, extra))
            assert own not in left, "nobody writes where another's part will be"
            left[own] = {program}
            teams[slot] += 1
            if teams[slot] <= high - low:
                continue
            teams[slot] = 0
            parts = _parts(plan, place, low, high, 1, left)
            assert parts == set(range(low, high + 1)), "a team's"
            if (low, high) == (first, last):
                assert written.setdefault(place, parts) is parts, "by one"
                continue
            left[slot] = parts
            counters[place] += 1
            if counters[place] > last // team - first // team:
                counters[place] = 0
                parts = _parts(plan, place, first, last, team, left)
                assert written.setdefault(place, parts) is parts, "by one"
        assert written == {place: parts for place, parts in held.items() if parts}
        assert not any(counters) and not any(teams)


def test_two_teams_or_less_are_one() -> None:
    """So the most parts that are added one after the other are twice a team's, and what a team's leaders leave."""
    plan = torch.full((64, 1, 5), -1, dtype=torch.int32)
    for count, most in ((16, 16), (17, 8)):
        plan.fill_(-1)
        tiles = torch.tensor([count], dtype=torch.int32)
        _plan[(count,)](plan, torch.zeros_like(tiles), tiles, count, 1, 8)
        rows = plan[:count, 0]
        assert int((rows[:, 3] - rows[:, 2] + 1).max()) == most
