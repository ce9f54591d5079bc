"""What rows ask of their tokens beyond temperature and cut-offs: the CPU's notes of it, and the state on the device behind it.

A row that asks nothing costs nothing here: its step is the plain one. One that does is drawn from again, alone, after the plain step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagecast_kernels.reference_token_rules import BIAS, EARLY, PENALTIES, WORDS
from pagecast_wire.codec import view_u32
from pagecast_wire.plan import Admission
from pagecast_wire.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams
from pagecast_worker.executor import PlanError
from pagecast_worker.results import PromptPart
from pagecast_worker.row_book import Forced, Int
from pagecast_worker.staging import Packet, Staging

_RECENT = MAX_BAD_WORD_TOKENS - 1


@dataclass(slots=True)
class StepRules:
    """The rows of one step that ask for something. places: where they stand among the step's sampling rows. kinds: bits of
    pagecast_kernels.reference_token_rules. constrained: which of those rows are under a constraint (indices into places).
    logprob_places, logprob_counts: rows whose log-probabilities are told, and of how many best tokens.
    """

    places: Int
    rows: Int
    kinds: NDArray[np.int32]
    constrained: Int
    logprob_places: Int
    logprob_counts: Int


@dataclass(slots=True)
class Masks:
    """What constraints allow in one step. index: for each of StepRules.places a line of words, or -1. words int32[M, ceil(V / 32)]."""

    index: Int
    words: NDArray[np.int32]


class TokenRules:
    """Columns by row, and tensors [R + 1, ..] on the device: counts int32 and bias float32 [.., V], penalties float32[.., 3], words
    int32[.., W, L] and recent int32[.., L - 1], as in reference.adjust_logits and forbid_tokens; made when a row first needs them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.kinds = np.zeros(max_rows + 1, np.int32)
        self.logprobs = np.full(max_rows + 1, -1, np.int64)
        self.prompt_logprobs = np.full(max_rows + 1, -1, np.int64)
        self.num_prompt = np.zeros(max_rows + 1, np.int64)
        self.constrained = np.zeros(max_rows + 1, np.bool_)
        self._asking: set[int] = set()  # rows with anything set in the columns above
        self._held = False
        none = torch.zeros((1, 1), dtype=torch.int32, device=device)
        self.counts = none
        self.words = torch.zeros((1, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), dtype=torch.int32, device=device)
        self.recent = torch.zeros((1, _RECENT), dtype=torch.int32, device=device)
        self.bias = self.penalties = none.float()
        self.no_mask = none

    def clear(self) -> None:
        """No row asks for anything."""
        for row in self._asking:
            self._forget(row)
        self._asking.clear()

    def admit(self, admissions: tuple[Admission, ...], staging: Staging) -> None:
        """Rows get new owners. Raises PlanError for rules that a row cannot hold."""
        for admission in admissions:
            row, sampling = admission.row, admission.sampling
            if row in self._asking:
                self._forget(row)
                self._asking.remove(row)
            kind = kinds_of(sampling)
            prompt_logprobs = sampling.num_prompt_logprobs if admission.sequence == 0 else -1
            constrained = sampling.constraint is not None
            if not kind and not constrained and sampling.num_logprobs < 0 and prompt_logprobs < 0:
                continue
            if max(sampling.num_logprobs, prompt_logprobs) > MAX_LOGPROBS:
                raise PlanError(f"row {row} asks for more than {MAX_LOGPROBS} log-probabilities")
            self._asking.add(row)
            self.kinds[row], self.constrained[row] = kind, constrained
            self.logprobs[row], self.prompt_logprobs[row] = sampling.num_logprobs, prompt_logprobs
            self.num_prompt[row] = admission.num_prompt_tokens
            if kind:
                self._hold()
                self._write(admission, kind, staging)

    def take(self, forced: Forced, staging: Staging) -> None:
        """Forced tokens count for penalties like drawn ones. Rows with bad words have none."""
        penalised = np.repeat(self.kinds[forced.rows] & PENALTIES != 0, forced.counts)
        if penalised.any():
            flat = (np.repeat(forced.rows, forced.counts) * self.vocab_size + forced.tokens)[penalised]
            counted = staging.upload(flat.astype(np.int32)).long()
            self.counts.view(-1).index_add_(0, counted, torch.full_like(counted, 2, dtype=torch.int32))

    def of_step(self, rows: Int, early: Int) -> StepRules | None:
        """What the sampling rows of a step ask for. early: those that may not end yet. None: nothing."""
        if not self._asking and not len(early):
            return None
        kinds = self.kinds[rows]
        if len(early):
            kinds |= np.where(np.isin(rows, early), np.int32(EARLY), np.int32(0))
        wanted, constrained = self.logprobs[rows], self.constrained[rows]
        places, logprob_places = np.flatnonzero((kinds != 0) | constrained), np.flatnonzero(wanted >= 0)
        if not len(places) and not len(logprob_places):
            return None
        among = np.flatnonzero(constrained[places])
        return StepRules(places, rows[places], kinds[places], among, logprob_places, wanted[logprob_places])

    def prompt_parts(self, rows: Int, starts: Int, lengths: Int) -> list[PromptPart]:
        """Which chunks of a step tell log-probabilities of the prompt."""
        if not self._asking:
            return []
        parts: list[PromptPart] = []
        first = np.cumsum(lengths) - lengths
        for at in np.flatnonzero(self.prompt_logprobs[rows] >= 0).tolist():
            row, start = int(rows[at]), int(starts[at])
            count = min(start + int(lengths[at]), int(self.num_prompt[row]) - 1) - start
            if count > 0:
                parts.append(PromptPart(row, start + 1, count, int(self.prompt_logprobs[row]), int(first[at])))
        return parts

    def state_bytes(self) -> int:
        """What the tensors take once they are made."""
        return len(self.kinds) * (8 * self.vocab_size + 4 * (3 + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS + _RECENT))

    def _forget(self, row: int) -> None:
        self.kinds[row], self.constrained[row] = 0, False
        self.logprobs[row] = self.prompt_logprobs[row] = -1

    def _hold(self) -> None:
        if self._held:
            return
        rows, vocab, device = len(self.kinds), self.vocab_size, self.device
        self.counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)
        self.bias = torch.zeros((rows, vocab), dtype=torch.float32, device=device)
        self.penalties = torch.zeros((rows, 3), dtype=torch.float32, device=device)
        self.words = torch.zeros((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), dtype=torch.int32, device=device)
        self.recent = torch.zeros((rows, _RECENT), dtype=torch.int32, device=device)
        self._held = True

    def _write(self, admission: Admission, kind: int, staging: Staging) -> None:
        """The row's tensors as its sequence's history makes them."""
        row, sampling = admission.row, admission.sampling
        tokens = view_u32(admission.tokens)
        packet = Packet()
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        packet.add(np.array(penalties, np.float32).view(np.int32))
        packet.add(tokens[: admission.num_prompt_tokens])
        packet.add(tokens[admission.num_prompt_tokens :])
        for column in self._biases(sampling):
            packet.add(column)
        packet.add(words_of(sampling))
        packet.add(_newest(tokens))
        penalties_sent, prompt, output, allowed, ids, values, words, recent = packet.upload(staging)
        self.penalties[row] = penalties_sent.view(torch.float32)
        if kind & PENALTIES:
            self.counts[row].zero_().index_fill_(0, prompt.long(), 1)
            self.counts[row].index_add_(0, output.long(), torch.full_like(output, 2))
        if kind & BIAS:
            self.bias[row] = -torch.inf if len(allowed) else 0.0
            self.bias[row].index_fill_(0, allowed.long(), 0.0)
            self.bias[row].index_add_(0, ids.long(), values.view(torch.float32))
        if kind & WORDS:
            self.words[row], self.recent[row] = words, recent

    def _biases(self, sampling: SamplingParams) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """allowed ids, biased ids, and the biases' bits. An id that the model does not have changes nothing."""
        allowed, ids = (view_u32(column).astype(np.int64) for column in (sampling.allowed_token_ids, sampling.logit_bias_ids))
        values = np.frombuffer(sampling.logit_bias_values, "<f4")
        if len(ids) != len(values):
            raise PlanError("logit_bias_ids and logit_bias_values differ in length")
        if len(allowed) and (allowed >= self.vocab_size).all():
            raise PlanError("allowed_token_ids holds no id of the model")
        known = ids < self.vocab_size
        return allowed[allowed < self.vocab_size].astype(np.int32), ids[known].astype(np.int32), values[known].view(np.int32)


def kinds_of(sampling: SamplingParams) -> int:
    """The bits of pagecast_kernels.reference_token_rules that a request needs from its first token on."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    biased = sampling.logit_bias_ids or sampling.allowed_token_ids
    return (PENALTIES if penalised else 0) | (BIAS if biased else 0) | (WORDS if sampling.bad_word_lengths else 0)


def words_of(sampling: SamplingParams) -> NDArray[np.int32]:
    """int32[W, L]: each bad word at the end of its places. Raises PlanError for words that a row cannot hold."""
    lengths, tokens = view_u32(sampling.bad_word_lengths).astype(np.int64), view_u32(sampling.bad_word_tokens)
    fits = len(lengths) <= MAX_BAD_WORDS and int(lengths.sum()) == len(tokens)
    if not fits or (lengths < 1).any() or (lengths > MAX_BAD_WORD_TOKENS).any():
        raise PlanError(f"bad words must be at most {MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD_TOKENS} tokens")
    table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    ends = np.cumsum(lengths)
    for at, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
        table[at, MAX_BAD_WORD_TOKENS - length :] = tokens[end - length : end]
    return table


def _newest(tokens: NDArray[np.uint32]) -> NDArray[np.int32]:
    held = np.full(_RECENT, -1, np.int32)
    newest = tokens[-_RECENT:]
    held[_RECENT - len(newest) :] = newest
    return held

