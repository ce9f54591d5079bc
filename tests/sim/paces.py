"""Pacing of class BATCH at the size of the simulator, whose rows and steps are too few for the numbers of a real device; counted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from sim.scenario import STEP_US

from pagecast_scheduler.core import backlog, gathering, pacing, policy, queue, request
from pagecast_scheduler.core.state import State

SMALL = {"FLAT_STEP": 6, "LEAST_FILL": 4, "BULK": 12, "STEP_GRAIN": 2, "MOST_STEPS_LATE": 3}
SMALL_GRAIN = 4
SMALL_PATIENCE_US = 25 * STEP_US


@dataclass(slots=True)
class Paces:
    """num_spread: steps whose prefill was to be no more than so many tokens. num_put_off: steps in which all prompts waited. num_held:
    times that no plan was made as more of a list were expected."""

    num_spread: int = 0
    num_put_off: int = 0
    num_held: int = 0


@contextmanager
def small_paces(counted: Paces | None = None) -> Iterator[None]:
    """While inside, few decodes are many and a short time is a long one."""
    paced, held, tally = pacing.paced_tokens, gathering.held_until, counted or Paces()

    def watched(*arguments: Any) -> int | None:
        tokens = paced(*arguments)
        tally.num_spread += bool(tokens)
        tally.num_put_off += tokens == 0
        return tokens

    def watched_holds(s: State, now: int) -> int:
        until = held(s, now)
        tally.num_held += until > now and bool(s.config.arrival_gap_us)
        return until

    with ExitStack() as stack:
        for name, value in SMALL.items():
            stack.enter_context(patch.object(policy, name, value))
        for module in (request, queue):
            stack.enter_context(patch.object(module, "PATIENT_US", SMALL_PATIENCE_US))
        stack.enter_context(patch.object(backlog, "GRAIN", SMALL_GRAIN))
        stack.enter_context(patch.object(pacing, "paced_tokens", watched))
        stack.enter_context(patch.object(gathering, "held_until", watched_holds))
        yield
