"""From logits to tokens, flags and the rows' next state, all on the device."""

from typing import Any

import torch
from torch import Tensor

from pagecast_wire.result import FLAG_BAD, FLAG_STOP
from pagecast_worker.batch_state import LAST_TOKEN, MIN_P, MIN_TOKENS, NUM_TOKENS, SEQUENCE, TEMPERATURE, TOP_K, TOP_P, BatchState
from pagecast_worker.inputs import SampleInputs


def sample_rows(ops: Any, state: BatchState, logits: Tensor, rows: SampleInputs) -> Tensor:
    """Draw one token for each row of logits[B, V] and move the rows past it. Returns int32[2, B]: tokens, flags.

    Running it again over the same inputs gives the same result: lengths are set from the gathered ones, not counted up.
    """
    lengths = rows.scalars[NUM_TOKENS]
    floats = rows.scalars.view(torch.float32)
    drawn = ops.sample(
        logits, floats[TEMPERATURE], rows.scalars[TOP_K], floats[TOP_P], floats[MIN_P], rows.seeds, rows.scalars[SEQUENCE], lengths
    )
    tokens = drawn.clamp(min=0)
    stopped = (rows.stops == tokens.unsqueeze(1)).any(1)
    flags = stopped * FLAG_STOP + (drawn < 0) * FLAG_BAD
    state.scalars[LAST_TOKEN].index_copy_(0, rows.rows, tokens)
    state.scalars[NUM_TOKENS].index_copy_(0, rows.rows, lengths + (lengths > 0))
    return torch.stack((tokens, flags.int()))


def forbid_early_stops(logits: Tensor, rows: SampleInputs) -> Tensor:
    """logits with -inf at the stop ids of rows that do not hold min_tokens tokens yet; a copy."""
    early = (rows.scalars[NUM_TOKENS] < rows.scalars[MIN_TOKENS]).unsqueeze(1) & (rows.stops >= 0)
    ids = rows.stops.clamp(min=0).long()
    # A row repeats its first stop id to the end, so equal ids always write equal values.
    values = logits.gather(1, ids).masked_fill(early, -torch.inf)
    return logits.scatter(1, ids, values)
