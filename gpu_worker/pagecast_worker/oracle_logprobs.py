"""Log-probabilities as the oracle invents them: functions of the token alone, so that a test knows what each stream must be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.plan import Admission, StepPlan
from pagecast_wire.result import FLAG_IDLE

_STEP: Final = np.float32(0.25)
Known = NDArray[np.uint32] | Mapping[int, NDArray[np.uint32]]
"""Tokens by row."""


def oracle_logprobs(token: int, num: int, vocab_size: int) -> tuple[float, list[int], list[float]]:
    """A token's log-probability, and the `num` best ids and theirs, best first: the token itself, then the ids after it."""
    chosen = -np.float32(1 + token % 64) / np.float32(64)
    return float(chosen), [(token + i) % vocab_size for i in range(num)], [float(chosen - _STEP * np.float32(i)) for i in range(num)]


@dataclass(slots=True)
class _Columns:
    counts: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)

    def add(self, token: int, num: int, vocab_size: int) -> None:
        chosen, ids, best = oracle_logprobs(token, num, vocab_size)
        self.values.append(chosen)
        self.ids += ids
        self.best += best


class OracleLogprobs:
    """Which rows ask, by row: (output, prompt, number of prompt tokens)."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._asked: dict[int, tuple[int, int, int]] = {}

    def admit(self, admission: Admission) -> None:
        sampling = admission.sampling
        prompt = sampling.num_prompt_logprobs if admission.sequence == 0 else -1
        self._asked.pop(admission.row, None)
        if max(sampling.num_logprobs, prompt) >= 0:
            self._asked[admission.row] = (sampling.num_logprobs, prompt, admission.num_prompt_tokens)

    def tells(self, row: int) -> bool:
        """Whether the row tells log-probabilities of its output."""
        return self._asked.get(row, (-1,))[0] >= 0

    def fields(
        self, plan: StepPlan, rows: NDArray[np.int64], tokens: NDArray[np.int64], flags: NDArray[np.uint8], known: Known
    ) -> dict[str, bytes]:
        """StepResult's columns for rows[n] that sampled tokens[steps, n]. known: every row's tokens."""
        if not self._asked:
            return {}
        return self._outputs(rows, tokens, flags) | self._prompts(plan, known)

    def _outputs(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], flags: NDArray[np.uint8]) -> dict[str, bytes]:
        told, at = _Columns(), []
        for k in range(len(tokens)):
            for place, row in enumerate(rows.tolist()):
                num = self._asked.get(row, (-1,))[0]
                if num >= 0 and not flags[k, place] & FLAG_IDLE:
                    at.append(k * len(rows) + place)
                    told.counts.append(num)
                    told.add(int(tokens[k, place]), num, self._vocab_size)
        return {
            "logprob_rows": pack_u32(at), "logprobs": _f32(told.values), "top_counts": pack_u32(told.counts), "top_ids": pack_u32(told.ids),
            "top_logprobs": _f32(told.best),
        }  # fmt: skip

    def _prompts(self, plan: StepPlan, known: Known) -> dict[str, bytes]:
        told, rows, starts, tops = _Columns(), [], [], []
        columns = (plan.chunk_rows, plan.chunk_starts, plan.chunk_lengths)
        for row, start, length in zip(*(view_u32(column).tolist() for column in columns), strict=True):
            _, num, num_prompt = self._asked.get(row, (-1, -1, 0))
            count = min(start + length, num_prompt - 1) - start
            if num < 0 or count <= 0:
                continue
            rows.append(row)
            starts.append(start + 1)
            tops.append(num)
            told.counts.append(count)
            for token in known[row][start + 1 : start + 1 + count].tolist():
                told.add(token, num, self._vocab_size)
        return {
            "prompt_rows": pack_u32(rows), "prompt_starts": pack_u32(starts), "prompt_counts": pack_u32(told.counts),
            "prompt_tops": pack_u32(tops), "prompt_logprobs": _f32(told.values), "prompt_top_ids": pack_u32(told.ids),
            "prompt_top_logprobs": _f32(told.best),
        }  # fmt: skip


def _f32(values: list[float]) -> bytes:
    return np.array(values, "<f4").tobytes()
