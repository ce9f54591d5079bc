"""Drawing tokens where the vocabulary is split over ranks: rows without filters or rules need each rank's best token only, a word a row
over the wire; where any row of a step needs more, the logits are gathered after all."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagecast_kernels.reference import GREEDY_BELOW
from pagecast_kernels.reference_shards import tokens_of
from pagecast_wire.plan import Admission
from pagecast_wire.result import FLAG_BAD, FLAG_STOP
from pagecast_worker.batch_state import NUM_TOKENS, SEQUENCE, TEMPERATURE, TOP_K, BatchState
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.step_outputs import Decoded, SampleInputs


class Filters:
    """Which rows filter by top-k, top-p or min-p."""

    def __init__(self, max_rows: int) -> None:
        self._rows = np.zeros(max_rows, dtype=bool)

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        for admission in admissions:
            sampling = admission.sampling
            random = sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1
            self._rows[admission.row] = random and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)

    def any_of(self, rows: NDArray[np.int64]) -> bool:
        return bool(self._rows[rows].any())


def draw_from_shards(ops: Any, model: Decoder, state: BatchState, hidden: Tensor, rows: SampleInputs, out: Tensor) -> Decoded:
    """Plain draws for hidden[B, H]. The result's logits are this rank's alone, in `out`."""
    local, floats = model.local_logits(ops, hidden, out), rows.scalars.view(torch.float32)
    keys = ops.best_of_shard(
        local, floats[TEMPERATURE], rows.scalars[TOP_K], rows.seeds, rows.scalars[SEQUENCE], rows.scalars[NUM_TOKENS],
        model.vocabulary.start,
    )  # fmt: skip
    drawn = tokens_of(model.ranks.all_gather(keys.unsqueeze(1)).amax(1))
    out = ops.finish_rows(drawn, rows.rows, rows.scalars[NUM_TOKENS], state.scalars, state.stops, FLAG_STOP, FLAG_BAD)
    return Decoded(out, local, rows)
