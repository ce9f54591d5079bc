"""Running sequences as a struct of arrays: one row each, the same row number that the workers use.

The decode path reads and writes whole arrays; nothing here holds or loops over a Python object per sequence, except the list that leads
from a row back to its sequence when something rare happens to it.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.request import Sequence

FAR = 1 << 40
"""A token count that no row reaches."""

Index = NDArray[np.int64]
EMPTY: Index = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ForcedRun:
    """Tokens (u32) that a row must go on with: tokens[i] stands at position start + i."""

    start: int
    tokens: NDArray[np.uint32]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Rows:
    """Arrays [max_num_seqs], by row.

    num_tokens: applied tokens (prompt and output). num_output: the output part, as the wire has it. num_planned: tokens once every
    plan in flight is applied; a decoding row's KV is planned for num_planned - 1 of them. num_computed: planned KV of a row that
    still prefills. capacity: tokens its blocks hold, FAR for a row that does not step. stepping: 1 where the row decodes in the next
    step. generation: changes when the row is freed, so that late results find nobody.
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        def column(fill: int = 0) -> NDArray[np.int64]:
            return np.full(num_rows, fill, np.int64)

        self.tokens: NDArray[np.uint32] = np.zeros((num_rows, max_model_len), np.uint32)
        self.flat_tokens = self.tokens.reshape(-1)  # the same memory
        self.num_tokens = column()
        self.num_output = np.zeros(num_rows, np.dtype("<u4"))
        self.num_planned = column()
        self.num_computed = column()
        self.max_tokens = column(FAR)
        self.capacity = column(FAR)
        self.stepping = column()
        self.decoding = np.zeros(num_rows, np.bool_)
        self.paused = np.zeros(num_rows, np.bool_)
        self.generation = column()
        self.key = np.zeros(num_rows, np.dtype("<u8"))  # as the wire has it
        self.index = np.zeros(num_rows, np.dtype("<u4"))
        self.slot = column()
        self.tenant = column()
        self.owners: list[Sequence | None] = [None] * num_rows
        self.forced: dict[int, ForcedRun] = {}  # rows whose next tokens are known
        self.prefilling: list[int] = []  # rows with prompt or history left to compute, oldest admission first
        self.num_active = 0
        self.num_paused = 0
        self.num_constrained = 0  # rows under a constraint, whose every token has to be known before the next
        self.num_freed = 0  # changes exactly when some generation does
        self.version = 0  # changes whenever the set of stepping rows does
        self._stepping: tuple[int, Index] = (0, EMPTY)
        self.high = 0  # rows at and above this are free
        self._free = list(range(num_rows))  # a heap: low rows first keep the arrays dense

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, seq: Sequence, num_computed: int) -> int:
        """Give `seq` the lowest free row, prefilling from num_computed on."""
        row = heapq.heappop(self._free)
        request = seq.request
        count = seq.num_tokens
        self.tokens[row, :count] = seq.tokens[:count]
        self.num_tokens[row] = self.num_planned[row] = count
        self.num_output[row] = count - request.num_prompt_tokens
        self.num_computed[row] = num_computed
        self.max_tokens[row] = request.max_tokens
        self.key[row], self.index[row] = request.key, seq.index
        self.slot[row], self.tenant[row] = request.slot, request.tenant
        self.paused[row] = request.paused
        self.num_paused += request.paused
        self.num_constrained += request.sampling.constraint is not None
        self.owners[row] = seq
        self.prefilling.append(row)
        self.num_active += 1
        self.high = max(self.high, row + 1)
        seq.row = row
        return row

    def start_decoding(self, row: int, capacity: int) -> None:
        """The plan being made reaches the end of the row's known tokens: it samples now and decodes from the next step on."""
        self.prefilling.remove(row)
        self.decoding[row] = True
        self.num_planned[row] += 1
        self._refresh(row, capacity)

    def set_paused(self, row: int, paused: bool, capacity: int) -> None:
        self.num_paused += int(paused) - int(self.paused[row])
        self.paused[row] = paused
        if self.decoding[row]:
            self._refresh(row, capacity)

    def close(self, row: int) -> None:
        """Free the row; its generation ends."""
        seq = self.owners[row]
        assert seq is not None
        seq.row = -1
        self.owners[row] = None
        if not self.decoding[row]:
            self.prefilling.remove(row)
        self.forced.pop(row, None)
        self.num_paused -= int(self.paused[row])
        self.num_constrained -= seq.request.sampling.constraint is not None
        self.decoding[row] = self.paused[row] = False
        self.stepping[row] = self.num_tokens[row] = self.num_planned[row] = self.num_computed[row] = 0
        self.max_tokens[row] = self.capacity[row] = FAR
        self.generation[row] += 1
        self.num_active -= 1
        self.num_freed += 1
        self.version += 1
        heapq.heappush(self._free, row)
        while self.high and self.owners[self.high - 1] is None:
            self.high -= 1

    def computed(self, row: int) -> int:
        """Tokens whose KV is written once every plan in flight has run."""
        return int(self.num_planned[row]) - 1 if self.decoding[row] else int(self.num_computed[row])

    def owner(self, row: int) -> Sequence:
        seq = self.owners[row]
        assert seq is not None
        return seq

    def running(self) -> list[Sequence]:
        """Sequences that have a row, by row."""
        return [seq for seq in self.owners[: self.high] if seq is not None]

    def stepping_rows(self) -> Index:
        """Rows that decode in the next step, ascending; found anew only when they change."""
        if self._stepping[0] != self.version:
            self._stepping = (self.version, self.stepping[: self.high].nonzero()[0])
        return self._stepping[1]

    def short_of_blocks(self) -> Index:
        """Stepping rows whose next token has no slot in their blocks."""
        return (self.num_planned[: self.high] > self.capacity[: self.high]).nonzero()[0]

    def advance(self) -> None:
        """Every stepping row has one token more planned."""
        planned = self.num_planned[: self.high]
        np.add(planned, self.stepping[: self.high], out=planned)  # `a[:n] += b` would copy the result onto itself

    def at_limit(self) -> Index:
        """Rows whose last token is planned."""
        return (self.num_planned[: self.high] >= self.max_tokens[: self.high]).nonzero()[0]

    def steps_to_limit(self) -> int:
        """Steps in which no stepping row can reach its limit."""
        stepping = self.stepping_rows()
        return int((self.max_tokens[stepping] - self.num_planned[stepping]).min()) if len(stepping) else 0

    def sitting_out(self) -> Index:
        """Decoding rows that are paused."""
        return np.flatnonzero(self.decoding[: self.high] & self.paused[: self.high])

    def _refresh(self, row: int, capacity: int) -> None:
        steps = bool(self.decoding[row]) and not bool(self.paused[row])
        self.stepping[row] = steps
        self.capacity[row] = capacity if steps else FAR
        self.version += 1
