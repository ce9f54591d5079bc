"""Log-probability records of the public API out of the wire's columns."""

from collections.abc import Iterator, Sequence

import numpy as np

from pagecast.v1 import generation_pb2 as pb
from pagecast_wire import view_u32
from pagecast_wire.intake import PromptLogprobs, TokenLogprobs

Bytes = Sequence[bytes] | None
"""What each id stands for in bytes, where the tokenizer knows."""


def bytes_of(table: Bytes, token_id: int) -> bytes:
    """Bytes of one id; none for a special token, or where nothing is known."""
    return table[token_id] if table is not None and token_id < len(table) else b""


def _floats(column: bytes) -> list[float]:
    values: list[float] = np.frombuffer(column, dtype="<f4").tolist()
    return values


def _record(token_id: int, logprob: float, top_ids: Sequence[int], top: Sequence[float], table: Bytes) -> pb.TokenLogprob:
    best = [pb.AlternativeToken(token_id=i, logprob=value, token_bytes=bytes_of(table, i)) for i, value in zip(top_ids, top)]
    return pb.TokenLogprob(token_id=token_id, logprob=logprob, top=best, token_bytes=bytes_of(table, token_id))


def raw_bytes(ids: Sequence[int], table: Bytes) -> bytes:
    """What the ids stand for, one after another."""
    return b"".join([bytes_of(table, token_id) for token_id in ids])


def output_records(ids: Sequence[int], records: Sequence[TokenLogprobs], table: Bytes) -> list[pb.TokenLogprob]:
    """One record for each id."""
    return [
        _record(token_id, record.logprob, view_u32(record.top_ids).tolist(), _floats(record.top_logprobs), table)
        for token_id, record in zip(ids, records, strict=True)
    ]


def prompt_records(
    prompt: bytes, parts: Sequence[tuple[int, PromptLogprobs]], table: Bytes, has_origin: bool = True
) -> Iterator[tuple[int, list[pb.TokenLogprob]]]:
    """(position of the first record, records) for each part; the one that begins at position 1 is given position 0 as well,
    if that is wanted."""
    ids = view_u32(prompt)
    for skip, part in parts:
        values, top_ids, top = _floats(part.logprobs), view_u32(part.top_ids).tolist(), _floats(part.top_logprobs)
        first, count = part.start + skip, part.num_top
        made = [
            _record(int(ids[part.start + at]), values[at], top_ids[at * count :][:count], top[at * count :][:count], table)
            for at in range(skip, len(values))
        ]
        if first == 1 and has_origin:
            first, made = 0, [origin(int(ids[0]), table), *made]
        yield first, made


def origin(token_id: int, table: Bytes) -> pb.TokenLogprob:
    """The record of a prompt's first token, which nothing comes before."""
    return pb.TokenLogprob(token_id=token_id, token_bytes=bytes_of(table, token_id))
