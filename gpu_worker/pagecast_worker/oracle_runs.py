"""The oracle's structured output: rows under a constraint, whatever it says, have runs of tokens that they must say.

Which follow from a row's drawn tokens alone, so that a row's place in a run is known again from its history.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.codec import view_u32
from pagecast_wire.plan import Admission
from pagecast_worker.executor import PlanError
from pagecast_worker.oracle_model import forced_run
from pagecast_worker.results import run_fields


@dataclass(slots=True)
class _Row:
    """ahead: what it must say next. tells: whether the scheduler may hear of it."""

    stop_ids: Collection[int]
    tells: bool
    ahead: list[int] = field(default_factory=list)
    told: bool = True


class OracleRuns:
    """The constrained rows of one epoch."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def admit(self, admission: Admission) -> None:
        """A row gets a new owner."""
        sampling = admission.sampling
        self._rows.pop(admission.row, None)
        if sampling.constraint is None:
            return
        row = self._rows[admission.row] = _Row(view_u32(admission.stop_token_ids).tolist(), sampling.num_logprobs < 0)
        for token in view_u32(admission.tokens)[admission.num_prompt_tokens :].tolist():
            self._follow(row, token)

    def force(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """The rows' drawn tokens become those that they must say, in place."""
        for place, number in enumerate(rows.tolist()) if self._rows else ():
            row = self._rows.get(number)
            if row is not None and row.ahead:
                tokens[place] = row.ahead[0]

    def follow(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Rows have said these tokens."""
        for number, token in zip(rows.tolist(), tokens.tolist(), strict=True) if self._rows else ():
            if number in self._rows:
                self._follow(self._rows[number], token)

    def take(self, number: int, tokens: list[int]) -> None:
        """A row jumps. Raises PlanError for tokens that it does not have to say."""
        row = self._rows.get(number)
        if row is None or row.ahead[: len(tokens)] != tokens:
            raise PlanError(f"row {number} is told to say what it does not have to")
        del row.ahead[: len(tokens)]

    def news(self, rows: NDArray[np.int64]) -> dict[str, bytes]:
        """StepResult's columns of runs that nobody was told of, for rows that sampled."""
        runs: list[tuple[int, list[int]]] = []
        for place, number in enumerate(rows.tolist()) if self._rows else ():
            row = self._rows.get(number)
            if row is not None and not row.told:
                row.told = True
                if row.tells and row.ahead:
                    runs.append((place, list(row.ahead)))
        return run_fields(runs)

    def _follow(self, row: _Row, token: int) -> None:
        if row.ahead:
            row.ahead.pop(0)
        else:
            row.ahead = forced_run(token, self._vocab_size, row.stop_ids)
            row.told = False
