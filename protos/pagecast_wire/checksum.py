"""The checksum by which a worker proves that its block tables are the scheduler's (StepPlan.table_checksum)."""

import zlib
from collections.abc import Iterable
from typing import Any

from pagecast_wire.codec import pack_u32


def table_checksum(rows: Iterable[tuple[int, int, Any]]) -> int:
    """CRC-32 over active rows, never 0 (0 means "no checksum" in a plan).

    rows: (row, num_planned, block ids in order) of every active row in ascending row number, as they are once releases, admissions
    and growth of the plan are applied. num_planned: known tokens, plus every token that this plan and the ones before it let the
    row decode (whether or not it met a stop id on the way); the token that a chunk of this very plan samples is not counted yet.
    """
    value = 0
    for row, num_planned, blocks in rows:
        value = zlib.crc32(pack_u32(blocks), zlib.crc32(pack_u32([row, num_planned]), value))
    return value or 1
