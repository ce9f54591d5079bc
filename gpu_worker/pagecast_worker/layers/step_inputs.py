"""What one forward pass computes over, as tensors on the device. Built by `inputs`, read by the layers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """T tokens: first one per decoding sequence (B of them), then the chunks of N prefilling sequences, end to end.

    token_ids, positions int32[T]; slot_mapping int64[T]; block_table int32[rows, blocks]. decode_rows, decode_seq_lens int32[B];
    prefill_rows, prefill_seq_lens int32[N]; query_start_loc int32[N + 1], counted from the step's first token.
    Where a graph holds the step, B is the places there are: decode_rows past the real ones are padding (length 0) and their tokens are
    the chunks' already, so attention decodes first and lets the chunks' results overwrite what it gave for padding.
    max_query_len: longest chunk, known on the CPU. shared: which of the decoding sequences begin with the same blocks, if that pays; only
    in steps without chunks. wanted int64[M]: tokens whose hidden states are asked for, in that order; None: all.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    num_decodes: int
    decode_rows: Tensor
    decode_seq_lens: Tensor
    num_prefills: int = 0
    prefill_rows: Tensor | None = None
    prefill_seq_lens: Tensor | None = None
    query_start_loc: Tensor | None = None
    max_query_len: int = 0
    shared: Any = None
    wanted: Tensor | None = None
