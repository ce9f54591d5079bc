"""An oracle for core tests: executes plans exactly as the contract says and refuses anything that does not hold.

Its memory has one cell per token: a digest of all tokens up to it. A row reads every cell of its context through the block table it was
given and compares it with the tokens that it should find, so a wrong block, length, hit or order is caught at once. The next
token is a function of (seed, sequence, all tokens before).
"""

from hashlib import blake2b

import numpy as np

from pagecast_wire.checksum import table_checksum
from pagecast_wire.codec import decode, encode, pack_u32, view_u32
from pagecast_wire.plan import StepPlan
from pagecast_wire.result import FLAG_BAD, FLAG_IDLE, FLAG_STOP, StepResult


def next_token(tokens, seed, sequence, vocab=2, stops=(), min_tokens=0):
    """What any schedule must produce after `tokens`. Where no stop may be sampled yet, the next id that is none."""
    payload = b"%d/%d/" % (seed, sequence) + np.asarray(tokens, "<u4").tobytes()
    token = int.from_bytes(blake2b(payload, digest_size=8).digest(), "little") % vocab
    if len(tokens) < min_tokens:
        while token in stops:
            token = (token + 1) % (vocab + 1)
    return token


def expected_output(prompt, max_output, seed=0, sequence=0, vocab=2, stops=(), min_output=0):
    """The whole output of a request that nobody interrupts, and whether it ends by a stop token."""
    tokens = list(prompt)
    for _ in range(max_output):
        token = next_token(tokens, seed, sequence, vocab, stops, len(prompt) + min_output)
        tokens.append(token)
        if token in stops:
            return tokens[len(prompt) :], True
    return tokens[len(prompt) :], False


def _cell(tokens):
    return blake2b(np.asarray(tokens, "<u4").tobytes(), digest_size=8).digest()


class _Row:
    def __init__(self, admission):
        self.tokens = view_u32(admission.tokens).tolist()
        self.known = len(self.tokens)
        self.blocks = view_u32(admission.blocks).tolist()
        self.max_tokens, self.min_tokens = admission.max_tokens, admission.min_tokens
        self.stops = view_u32(admission.stop_token_ids).tolist()
        self.seed, self.sequence = admission.sampling.seed, admission.sequence
        self.computed = admission.num_computed_tokens
        self.decoding = False


class TinyWorker:
    """bad: called with (tokens of the row) and returns True where the logits are to be not a number."""

    def __init__(self, start, vocab=2, bad=lambda tokens: False):
        self.start, self.vocab, self.bad = start, vocab, bad
        self.cells = {}
        self.rows = {}
        self.step = 0
        self.num_samples = 0

    def run(self, plan: StepPlan) -> StepResult:
        plan = decode(encode(plan), "to_worker")
        assert plan.epoch == self.start.epoch and plan.step == self.step + 1
        self.step = plan.step
        for row in view_u32(plan.released).tolist():
            del self.rows[row]
        for admission in plan.admissions:
            assert admission.row not in self.rows and admission.row < self.start.max_num_seqs
            self.rows[admission.row] = _Row(admission)
        for row, block in zip(view_u32(plan.grown_rows).tolist(), view_u32(plan.grown_blocks).tolist(), strict=True):
            self.rows[row].blocks.append(block)
        if plan.table_checksum:
            held = [(row, len(state.tokens), state.blocks) for row, state in sorted(self.rows.items())]
            assert plan.table_checksum == table_checksum(held)
        return self._compute(plan)

    def _compute(self, plan):
        paused = set(view_u32(plan.paused).tolist())
        decoding = sorted(row for row, state in self.rows.items() if state.decoding and row not in paused)
        chunks = list(zip(*(view_u32(c).tolist() for c in (plan.chunk_rows, plan.chunk_starts, plan.chunk_lengths)), strict=True))
        total = len(decoding) + sum(length for _, _, length in chunks)
        assert 0 < total <= self.start.max_num_batched_tokens
        finishing = []
        for row, start, length in chunks:
            state = self.rows[row]
            assert not state.decoding and start == state.computed and length > 0 and start + length <= state.known
            self._write(state, start, start + length)
            state.computed = start + length
            if state.computed == state.known:
                finishing.append(row)
        for row, _, _ in chunks:
            self._check(self.rows[row], self.rows[row].computed)
        sampling = sorted([*decoding, *finishing])
        tokens, flags = np.zeros((plan.num_steps, len(sampling)), np.uint32), np.full((plan.num_steps, len(sampling)), FLAG_IDLE, np.uint8)
        ended = set()
        for k in range(plan.num_steps):
            for at, row in enumerate(sampling):
                if row in ended:
                    continue
                state = self.rows[row]
                if row not in finishing:
                    assert len(state.tokens) < state.max_tokens, "a row was planned beyond its limit"
                    self._write(state, len(state.tokens) - 1, len(state.tokens))
                tokens[k, at], flags[k, at] = self._sample(state)
                if plan.num_steps > 1 and (flags[k, at] & FLAG_STOP or len(state.tokens) >= state.max_tokens):
                    ended.add(row)
        for row in finishing:
            self.rows[row].decoding = True
        return decode(encode(StepResult(plan.epoch, plan.step, 0, pack_u32(tokens.ravel()), flags.tobytes())), "from_worker")

    def _slot(self, state, position):
        size = self.start.block_size
        block = state.blocks[position // size]
        assert 1 <= block < self.start.num_blocks
        return block * size + position % size

    def _write(self, state, start, end):
        for position in range(start, end):
            self.cells[self._slot(state, position)] = _cell(state.tokens[: position + 1])

    def _check(self, state, end):
        for position in range(end):
            assert self.cells.get(self._slot(state, position)) == _cell(state.tokens[: position + 1]), "corrupt KV read"

    def _sample(self, state):
        self._check(state, len(state.tokens))
        self.num_samples += 1
        if self.bad(state.tokens):
            state.tokens.append(0)
            return 0, FLAG_BAD
        token = next_token(state.tokens, state.seed, state.sequence, self.vocab, state.stops, state.min_tokens)
        state.tokens.append(token)
        return token, FLAG_STOP if token in state.stops else 0
