"""The two ends of a step, one launch each: gathering what the rows' state says, and moving the rows past a token.

One program per row. Rows never move, so places of a batch name the rows that they stand for; several places may name the padding
row, which holds no token and to which all of them write the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["stride"])
def _gather_rows(
    rows_ptr, scalars_ptr, seeds_ptr, table_ptr, gathered_ptr, seeds_out_ptr, positions_ptr, slots_ptr,
    stride, scalars_stride, table_stride, BLOCK_SIZE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place).to(tl.int64)
    field = tl.arange(0, FIELDS)
    tl.store(gathered_ptr + field * stride + place, tl.load(scalars_ptr + field * scalars_stride + row))
    tl.store(seeds_out_ptr + place, tl.load(seeds_ptr + row))
    length = tl.load(scalars_ptr + row)
    position = tl.maximum(length - 1, 0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(positions_ptr + place, position)
    tl.store(slots_ptr + place, tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))


def gather_rows(rows: Tensor, scalars: Tensor, seeds: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See reference.gather_rows. The number of fields is a power of two; the last axes are contiguous."""
    batch, fields = rows.shape[0], scalars.shape[0]
    # Fields start at multiples of 16 bytes: kernels are compiled once more for pointers that do not.
    gathered = torch.empty((fields, -(-batch // 4) * 4), dtype=torch.int32, device=rows.device)[:, :batch]
    drawn_seeds, slots = (torch.empty(batch, dtype=torch.int64, device=rows.device) for _ in range(2))
    positions = torch.empty(batch, dtype=torch.int32, device=rows.device)
    if batch:
        _gather_rows[(batch,)](
            rows, scalars, seeds, table, gathered, drawn_seeds, positions, slots, gathered.stride(0), scalars.stride(0), table.stride(0),
            block_size, fields, num_warps=1,
        )  # fmt: skip
    return gathered, drawn_seeds, positions, slots


@triton.jit(do_not_specialize=["num_decodes", "num_tokens", "num_samples", "padding", "stride"])
def _gather_padded(
    decode_rows_ptr, tokens_ptr, positions_ptr, sent_slots_ptr, sample_rows_ptr, sample_index_ptr, scalars_ptr, seeds_ptr, table_ptr,
    lengths_ptr, slots_ptr, gathered_ptr, seeds_out_ptr, wanted_ptr,
    num_decodes, num_tokens, num_samples, padding, stride, scalars_stride, table_stride, BLOCK_SIZE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A program for each place, which is one of a token, of a decoding row in front, and of a row that samples."""
    place = tl.program_id(0)
    decodes, has_token, samples = place < num_decodes, place < num_tokens, place < num_samples
    row = tl.load(decode_rows_ptr + place, decodes, padding).to(tl.int64)
    length = tl.load(scalars_ptr + row)
    real = row != padding
    tl.store(lengths_ptr + place, tl.where(real, length, -1), decodes)
    position = tl.maximum(length - 1, 0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
    known = tl.where(length > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    sent = tl.load(sent_slots_ptr + place, has_token, -1).to(tl.int64)
    tl.store(slots_ptr + place, tl.where(real, known, sent), has_token)
    tl.store(tokens_ptr + place, tl.load(scalars_ptr + scalars_stride + row), real)
    tl.store(positions_ptr + place, position, real)
    field = tl.arange(0, FIELDS)
    drawing = tl.load(sample_rows_ptr + place, samples, padding).to(tl.int64)
    values = tl.load(scalars_ptr + field * scalars_stride + drawing)
    tl.store(gathered_ptr + field * stride + place, values, (field < FIELDS) & samples)
    tl.store(seeds_out_ptr + place, tl.load(seeds_ptr + drawing), samples)
    tl.store(wanted_ptr + place, tl.load(sample_index_ptr + place, samples, 0).to(tl.int64), samples)


def gather_padded(
    decode_rows: Tensor, token_ids: Tensor, positions: Tensor, slots: Tensor, sample_rows: Tensor, sample_index: Tensor, scalars: Tensor,
    seeds: Tensor, table: Tensor, block_size: int, padding: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See reference.gather_padded. The number of fields is a power of two; the last axes are contiguous."""
    fields, device = scalars.shape[0], scalars.device
    num_decodes, num_tokens, num_samples = len(decode_rows), len(token_ids), len(sample_rows)
    lengths = torch.empty(num_decodes, dtype=torch.int32, device=device)
    all_slots = torch.empty(num_tokens, dtype=torch.int64, device=device)
    gathered = torch.empty((fields, -(-num_samples // 4) * 4), dtype=torch.int32, device=device)[:, :num_samples]  # as in gather_rows
    drawn_seeds, wanted = (torch.empty(num_samples, dtype=torch.int64, device=device) for _ in range(2))
    _gather_padded[(max(num_decodes, num_tokens, num_samples),)](
        decode_rows, token_ids, positions, slots, sample_rows, sample_index, scalars, seeds, table, lengths, all_slots, gathered,
        drawn_seeds, wanted, num_decodes, num_tokens, num_samples, padding, gathered.stride(0), scalars.stride(0), table.stride(0),
        block_size, fields, num_warps=1,
    )  # fmt: skip
    return lengths, all_slots, gathered, drawn_seeds, wanted


@triton.jit(do_not_specialize=["batch"])
def _finish_rows(
    drawn_ptr, rows_ptr, lengths_ptr, scalars_ptr, stops_ptr, out_ptr, batch, scalars_stride, stops_stride,
    STOP_FLAG: tl.constexpr, BAD_FLAG: tl.constexpr, STOPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place).to(tl.int64)
    drawn = tl.load(drawn_ptr + place)
    token = tl.maximum(drawn, 0)
    lane = tl.arange(0, LANES)
    ids = tl.load(stops_ptr + row * stops_stride + lane, lane < STOPS, -1)
    stopped = tl.max((ids == token).to(tl.int32), 0)
    tl.store(out_ptr + place, token)
    tl.store(out_ptr + batch + place, stopped * STOP_FLAG + (drawn < 0).to(tl.int32) * BAD_FLAG)
    length = tl.load(lengths_ptr + place)
    tl.store(scalars_ptr + scalars_stride + row, token)
    tl.store(scalars_ptr + row, length + (length > 0).to(tl.int32))


def finish_rows(drawn: Tensor, rows: Tensor, lengths: Tensor, scalars: Tensor, stops: Tensor, stop_flag: int, bad_flag: int) -> Tensor:
    """See reference.finish_rows. The last axes are contiguous."""
    batch, num_stops = rows.shape[0], stops.shape[1]
    out = torch.empty((2, batch), dtype=torch.int32, device=rows.device)
    if batch:
        _finish_rows[(batch,)](
            drawn, rows, lengths, scalars, stops, out, batch, scalars.stride(0), stops.stride(0),
            stop_flag, bad_flag, num_stops, triton.next_power_of_2(num_stops), num_warps=1,
        )  # fmt: skip
    return out
