"""The device's side of the rows: what sampling and input building need, in rows that never move.

One row more than the scheduler has is kept as padding for graphs: it holds no token, so kernels skip it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagecast_wire.codec import view_u32
from pagecast_wire.plan import Admission
from pagecast_worker.executor import PlanError
from pagecast_worker.row_book import Changes, Forced
from pagecast_worker.staging import Packet

MAX_STOP_IDS = 160
"""Stop ids that a row can hold; the front end allows 128 and adds the model's end tokens."""

NUM_TOKENS, LAST_TOKEN, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEQUENCE = range(7)
"""Rows of `scalars`, whose last is spare: operators want a power of two. TEMPERATURE, TOP_P and MIN_P hold the bits of a float32."""


class BatchState:
    """Tensors [.., R + 1] for R rows; `padding` is the number of the extra row.

    table int32[R + 1, blocks per row]; scalars int32[8, R + 1]; seeds int64[R + 1] (64 unsigned bits); stops int32[R + 1, S], each
    row filled up with its own first stop id, or -1 where it has none.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.padding = max_rows
        self.max_blocks = max_blocks
        self.table = torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.scalars = torch.zeros((8, max_rows + 1), dtype=torch.int32, device=device)
        self.seeds = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.stops = torch.full((max_rows + 1, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """As new, in place: graphs hold these addresses."""
        for tensor in (self.table, self.scalars, self.seeds):
            tensor.zero_()
        self.stops.fill_(-1)

    def pack(self, changes: Changes, forced: Forced | None, packet: Packet) -> None:
        """Adds what `unpack` takes."""
        if changes.admissions:
            rows = np.array([a.row for a in changes.admissions])
            packet.add(rows)
            packet.add(np.stack([scalars_of(a) for a in changes.admissions], axis=1))
            packet.add(np.array([a.sampling.seed & (1 << 64) - 1 for a in changes.admissions], dtype=np.uint64).view(np.int32))
            packet.add(np.stack([stops_of(a) for a in changes.admissions]))
        if len(changes.table_index):
            packet.add(changes.table_index.view(np.int32))  # as 64 bits, which index_copy_ wants
            packet.add(changes.table_blocks)
        if forced is not None:
            packet.add(forced.rows)
            packet.add(forced.held)

    def unpack(self, changes: Changes, forced: Forced | None, parts: list[Tensor]) -> None:
        """Writes what `pack` added; removes it from the front of parts."""
        if changes.admissions:
            rows, scalars, seeds, stops = parts[0].long(), parts[1], parts[2], parts[3]
            del parts[:4]
            self.scalars.index_copy_(1, rows, scalars)
            self.seeds.index_copy_(0, rows, seeds.view(torch.int64))
            self.stops.index_copy_(0, rows, stops)
        if len(changes.table_index):
            index, blocks = parts[0].view(torch.int64), parts[1]
            del parts[:2]
            self.table.view(-1).index_copy_(0, index, blocks)
        if forced is not None:
            self.scalars[NUM_TOKENS].index_copy_(0, parts[0].long(), parts[1])
            del parts[:2]


def scalars_of(admission: Admission) -> NDArray[np.int32]:
    """int32[8] in the order of the constants above."""
    sampling = admission.sampling
    floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], dtype=np.float32).view(np.int32)
    known = len(admission.tokens) // 4
    limit = np.iinfo(np.int32).max
    return np.array(
        [known, 0, floats[0], min(sampling.top_k, limit), floats[1], floats[2], admission.sequence, 0],
        dtype=np.int32,
    )


def stops_of(admission: Admission) -> NDArray[np.int32]:
    """int32[S]. Raises PlanError for more ids than a row can hold."""
    ids = view_u32(admission.stop_token_ids)
    if len(ids) > MAX_STOP_IDS:
        raise PlanError(f"row {admission.row} has {len(ids)} stop ids, the limit is {MAX_STOP_IDS}")
    stops = np.full(MAX_STOP_IDS, ids[0] if len(ids) else -1, dtype=np.int32)
    stops[: len(ids)] = ids
    return stops
