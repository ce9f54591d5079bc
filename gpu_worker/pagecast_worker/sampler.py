"""From logits to tokens, flags and the rows' next state, all on the device."""

from typing import Any

import torch
from torch import Tensor

from pagecast_wire.result import FLAG_BAD, FLAG_STOP
from pagecast_worker.batch_state import MIN_P, MIN_TOKENS, NUM_TOKENS, SEQUENCE, TEMPERATURE, TOP_K, TOP_P, BatchState
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
    return ops.finish_rows(drawn, rows.rows, lengths, state.scalars, state.stops, FLAG_STOP, FLAG_BAD)


def forbid_early_stops(state: BatchState, logits: Tensor, rows: SampleInputs) -> Tensor:
    """logits with -inf at the stop ids of rows that do not hold min_tokens tokens yet; a copy."""
    stops = state.stops.index_select(0, rows.rows)
    early = (rows.scalars[NUM_TOKENS] < rows.scalars[MIN_TOKENS]).unsqueeze(1) & (stops >= 0)
    ids = stops.clamp(min=0).long()
    # A row repeats its first stop id to the end, so equal ids always write equal values.
    values = logits.gather(1, ids).masked_fill(early, -torch.inf)
    return logits.scatter(1, ids, values)
