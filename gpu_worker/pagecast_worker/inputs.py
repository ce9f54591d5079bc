"""From a schedule to the tensors of a forward pass.

A decode-only step is built on the device from the rows' state alone, by the same calls whether a graph captures them or not; of it
the CPU sends nothing but row numbers, and those only when they change. A step with chunks is built on the CPU, which knows every
position, and sent in one packet; only the decoding rows' last tokens are filled in on the device.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagecast_worker.batch_state import LAST_TOKEN, NUM_TOKENS, BatchState
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.mixed_graphs import PaddedStep
from pagecast_worker.row_book import RowBook, Schedule
from pagecast_worker.staging import Packet
from pagecast_worker.step_outputs import SampleInputs


def sample_inputs(ops: Any, state: BatchState, rows: Tensor, block_size: int) -> SampleInputs:
    """The state of rows int32[B], gathered."""
    scalars, seeds, _, _ = ops.gather_rows(rows, state.scalars, state.seeds, state.table, block_size)
    return SampleInputs(rows, scalars, seeds)


def decode_inputs(ops: Any, state: BatchState, rows: Tensor, block_size: int) -> tuple[StepInputs, SampleInputs]:
    """Inputs of a step in which rows int32[B] decode one token each. Rows without a token (padding) write nothing and see nothing."""
    scalars, seeds, positions, slots = ops.gather_rows(rows, state.scalars, state.seeds, state.table, block_size)
    step = StepInputs(
        token_ids=scalars[LAST_TOKEN], positions=positions, slot_mapping=slots, block_table=state.table,
        num_decodes=rows.shape[0], decode_rows=rows, decode_seq_lens=scalars[NUM_TOKENS],
    )
    return step, SampleInputs(rows, scalars, seeds)


def padded_inputs(ops: Any, state: BatchState, padded: PaddedStep, block_size: int) -> tuple[StepInputs, SampleInputs]:
    """Inputs of a padded step, from tensors alone: as sent, but for the decoding rows in front, which are as in `decode_inputs`."""
    lengths, slots, scalars, seeds, wanted = ops.gather_padded(
        padded.decode_rows, padded.token_ids, padded.positions, padded.slots, padded.sample_rows, padded.sample_index, state.scalars,
        state.seeds, state.table, block_size, state.padding,
    )  # fmt: skip
    step = StepInputs(
        token_ids=padded.token_ids, positions=padded.positions, slot_mapping=slots, block_table=state.table,
        num_decodes=padded.size.decodes, decode_rows=padded.decode_rows, decode_seq_lens=lengths, num_prefills=padded.size.chunks,
        prefill_rows=padded.rows, prefill_seq_lens=padded.seq_lens, query_start_loc=padded.starts, max_query_len=padded.size.tokens,
        wanted=wanted,
    )
    return step, SampleInputs(padded.sample_rows, scalars, seeds)


def pack_mixed(schedule: Schedule, book: RowBook, packet: Packet) -> None:
    """Adds what `unpack_mixed` takes."""
    decodes, (chunk_rows, chunk_positions, starts) = len(schedule.decode_rows), schedule.chunk_tokens()
    rows = np.concatenate((schedule.decode_rows, chunk_rows))
    positions = np.concatenate((schedule.decode_positions, chunk_positions))
    tokens = np.zeros(len(rows), dtype=np.int32)
    tokens[decodes:] = book.known[chunk_rows, chunk_positions]
    packet.add(tokens)
    packet.add(positions)
    packet.add(book.slots(rows, positions))
    packet.add(schedule.decode_rows)
    packet.add(schedule.decode_positions + 1)
    packet.add(schedule.chunk_rows)
    packet.add(schedule.chunk_starts + schedule.chunk_lengths)
    packet.add(starts + decodes)
    packet.add(schedule.sample_index)
    packet.add(schedule.sample_rows)


def unpack_mixed(schedule: Schedule, state: BatchState, parts: list[Tensor], *, whole: bool) -> tuple[StepInputs, Tensor, Tensor]:
    """Step inputs, the tokens int64 whose hidden states go through the head, and the rows int32 that those sample for.

    whole: all hidden states are wanted, not only those. Where nobody samples the first token's is, so that operators have something to do.
    """
    tokens, positions, slots, decode_rows, decode_lens, rows, lens, starts, sample_index, sample_rows = parts
    decodes = len(schedule.decode_rows)
    if decodes:
        tokens[:decodes] = state.scalars[LAST_TOKEN].index_select(0, decode_rows.long())
    step = StepInputs(
        token_ids=tokens, positions=positions, slot_mapping=slots.long(), block_table=state.table, num_decodes=decodes,
        decode_rows=decode_rows, decode_seq_lens=decode_lens, num_prefills=len(schedule.chunk_rows), prefill_rows=rows,
        prefill_seq_lens=lens, query_start_loc=starts, max_query_len=int(schedule.chunk_lengths.max()),
    )
    index = sample_index.long() if len(sample_index) else torch.zeros(1, dtype=torch.int64, device=slots.device)
    step.wanted = None if whole else index
    return step, index, sample_rows
