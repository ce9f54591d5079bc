"""Log-probabilities on their way from results to front ends: of output tokens beside the tokens, of prompts once for each position."""

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.outputs import Cohort
from pagecast_scheduler.core.request import Sequence
from pagecast_scheduler.core.state import InFlight, State
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import PromptLogprobs, TokenLogprobs
from pagecast_wire.result import StepResult

Logprobs = dict[int, tuple[float, bytes, bytes]]


def read_logprobs(result: StepResult) -> Logprobs:
    """Index into the token column -> (log-probability, best ids, their log-probabilities)."""
    at = view_u32(result.logprob_rows).tolist()
    values = np.frombuffer(result.logprobs, "<f4").tolist()
    counts = view_u32(result.top_counts).tolist() if result.top_counts else [0] * len(at)
    found: Logprobs = {}
    start = 0
    for index, value, count in zip(at, values, counts, strict=True):
        part = slice(4 * start, 4 * (start + count))
        found[index] = (value, result.top_ids[part], result.top_logprobs[part])
        start += count
    return found


def emit_logprobs(s: State, cohort: Cohort, usable: NDArray[np.bool_], logprobs: Logprobs) -> None:
    """Those of rows that are still who they were; to be called before their tokens are appended."""
    for at, values in logprobs.items():
        if 0 <= at < len(usable) and usable[at]:
            row = int(cohort.rows[at])
            seq = s.rows.owner(row)
            offset = int(s.rows.num_tokens[row]) - seq.request.num_prompt_tokens
            s.outputs.add_logprobs(seq.request.slot, token_logprobs(seq, offset, values))


def token_logprobs(seq: Sequence, offset: int, values: tuple[float, bytes, bytes]) -> TokenLogprobs:
    return TokenLogprobs(seq.request.key, seq.index, offset, values[0], values[1], values[2])


def tell_prompts(s: State, record: InFlight, result: StepResult) -> None:
    """Parts of prompts, of rows that are still who they were when the plan was made; what was told before is left out."""
    columns = (result.prompt_rows, result.prompt_starts, result.prompt_counts, result.prompt_tops)
    begun, best = 0, 0
    telling = dict(record.telling)
    for row, start, count, num in zip(*(view_u32(column).tolist() for column in columns), strict=True):
        values = result.prompt_logprobs[4 * begun : 4 * (begun + count)]
        tops = slice(4 * best, 4 * (best + count * num))
        begun, best = begun + count, best + count * num
        seq = s.holder(row, telling[row]) if row in telling else None
        if seq is None:
            continue
        request = seq.request
        told = max(0, request.prompt_told - start)
        if told >= count:
            continue
        skipped = 4 * num * told
        ids, logprobs = result.prompt_top_ids[tops][skipped:], result.prompt_top_logprobs[tops][skipped:]
        part = PromptLogprobs(request.key, start + told, num, values[4 * told :], ids, logprobs)
        request.prompt_told = start + count
        s.outputs.add_prompt_logprobs(request.slot, part)
