"""The checksum by which a worker proves that its block tables are the scheduler's (StepPlan.table_checksum)."""

import zlib
from collections.abc import Iterable
from typing import Any

from pagecast_wire.codec import pack_u32


def table_checksum(rows: Iterable[tuple[int, int, Any]]) -> int:
    """CRC-32 over active rows, never 0 (0 means "no checksum" in a plan).

    rows: (row, num_tokens, block ids in order) of every active row in ascending row number, as they are once releases, admissions
    and growth of the plan are applied and before its tokens are computed. num_tokens: known tokens and those sampled since. The
    scheduler sends none while a plan of several steps is in flight, since it cannot know yet which rows stopped early in it.
    """
    value = 0
    for row, num_tokens, blocks in rows:
        value = zlib.crc32(pack_u32(blocks), zlib.crc32(pack_u32([row, num_tokens]), value))
    return value or 1
