"""A plan's result, put together from what came down from the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import FLAG_DEAD, FLAG_IDLE, FLAG_STOP, StepResult
from pagecast_worker.row_book import Int

Arrays = list[NDArray[np.int32]]
Runs = Sequence[tuple[int, list[int]]]
"""Forced tokens to tell of: (where the token before them stands among the step's, the tokens)."""


@dataclass(slots=True)
class PromptPart:
    """Log-probabilities of prompt tokens [start, start + count) of a row, of `num` best tokens each. first: where the chunk that
    computes them begins among the step's prefill tokens."""

    row: int
    start: int
    count: int
    num: int
    first: int


@dataclass(slots=True)
class SubStep:
    """One of a plan's steps: the rows that sample in it, ascending, and which of them tell log-probabilities, of how many best tokens."""

    rows: Int
    logprob_places: Int
    logprob_counts: Int


@dataclass(slots=True)
class Kept:
    """What a plan keeps on the device, in order: an array for each prompt part, then for each step that samples its tokens and flags and,
    if any row asks, its log-probabilities."""

    prompts: list[PromptPart] = field(default_factory=list)
    steps: list[SubStep] = field(default_factory=list)


def split_arrays(kept: Kept, arrays: Arrays) -> tuple[Arrays, Arrays, list[NDArray[np.int32] | None]]:
    """Prompt parts' arrays, tokens and flags [2, rows] of each step that samples, and its log-probabilities, if any."""
    count = len(kept.prompts)
    following = iter(arrays[count:])
    sampled: Arrays = []
    logprobs: list[NDArray[np.int32] | None] = []
    for step in kept.steps:
        if len(step.rows):
            sampled.append(next(following))
            logprobs.append(next(following) if len(step.logprob_places) else None)
    return arrays[:count], sampled, logprobs


def build_result(plan: StepPlan, rank: int, kept: Kept, arrays: Arrays, device_us: int, runs: Runs = ()) -> StepResult:
    prompts, sampled, logprobs = split_arrays(kept, arrays)
    tokens, flags = join_steps(sampled, [step.rows for step in kept.steps])
    return StepResult(
        epoch=plan.epoch, step=plan.step, rank=rank, tokens=pack_u32(tokens), flags=flags.tobytes(), device_us=device_us,
        **_logprob_fields(kept.steps, logprobs), **_prompt_fields(kept.prompts, prompts), **run_fields(runs),
    )  # fmt: skip


def join_steps(arrays: Arrays, sub_rows: list[Int]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Tokens int32 and flags uint8, [steps, rows that sample in the first], from each step's [2, rows of that step].

    A row that a step leaves out, or that ended in an earlier one, is idle there.
    """
    rows = sub_rows[0]
    if len(sub_rows) == 1:
        drawn = arrays[0] if len(rows) else np.zeros((2, 0), dtype=np.int32)
        return drawn[:1], drawn[1:].astype(np.uint8)
    tokens = np.zeros((len(sub_rows), len(rows)), dtype=np.int32)
    flags = np.full((len(sub_rows), len(rows)), FLAG_IDLE, dtype=np.uint8)
    filled = iter(arrays)
    ended = np.zeros(len(rows), dtype=bool)
    for k, sampled in enumerate(sub_rows):
        if not len(sampled):
            continue
        out = next(filled)
        places = np.searchsorted(rows, sampled)
        tokens[k, places] = out[0]
        flags[k, places] = out[1]
        flags[k, ended] = FLAG_IDLE
        ended |= flags[k] & (FLAG_STOP | FLAG_DEAD) != 0
    return tokens, flags


def run_fields(runs: Runs) -> dict[str, bytes]:
    """StepResult's columns of forced tokens."""
    if not runs:
        return {}
    return {
        "forced_at": pack_u32([at for at, _ in runs]), "forced_counts": pack_u32([len(run) for _, run in runs]),
        "forced_tokens": pack_u32([token for _, run in runs for token in run]),
    }  # fmt: skip


def _logprob_fields(steps: list[SubStep], arrays: list[NDArray[np.int32] | None]) -> dict[str, bytes]:
    if all(array is None for array in arrays):
        return {}
    at: list[int] = []
    counts: list[int] = []
    values, ids, best = bytearray(), bytearray(), bytearray()
    filled = iter(arrays)
    for k, step in enumerate(steps):
        array = next(filled) if len(step.rows) else None
        if array is None:
            continue
        width = (array.shape[1] - 1) // 2
        places = np.searchsorted(steps[0].rows, step.rows[step.logprob_places]) + k * len(steps[0].rows)
        for line, place, count in zip(array, places.tolist(), step.logprob_counts.tolist(), strict=True):
            at.append(place)
            counts.append(count)
            values += line[:1].tobytes()
            ids += line[1 : 1 + count].tobytes()
            best += line[1 + width : 1 + width + count].tobytes()
    return {
        "logprob_rows": pack_u32(at), "logprobs": bytes(values), "top_counts": pack_u32(counts), "top_ids": bytes(ids),
        "top_logprobs": bytes(best),
    }  # fmt: skip


def _prompt_fields(parts: list[PromptPart], arrays: Arrays) -> dict[str, bytes]:
    if not parts:
        return {}
    columns = zip(*((part.row, part.start, part.count, part.num) for part in parts), strict=True)
    rows, starts, counts, tops = (pack_u32(column) for column in columns)
    pieces = [(a[:, 0], a[:, 1 : 1 + p.num], a[:, 1 + p.num :]) for p, a in zip(parts, arrays, strict=True)]
    values, ids, best = (b"".join(np.ascontiguousarray(piece).tobytes() for piece in column) for column in zip(*pieces, strict=True))
    return {
        "prompt_rows": rows, "prompt_starts": starts, "prompt_counts": counts, "prompt_tops": tops, "prompt_logprobs": values,
        "prompt_top_ids": ids, "prompt_top_logprobs": best,
    }  # fmt: skip
