"""From logits to tokens, flags and the rows' next state, all on the device."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagecast_wire.result import FLAG_BAD, FLAG_DEAD, FLAG_STOP
from pagecast_worker.batch_state import MIN_P, NUM_TOKENS, SEQUENCE, TEMPERATURE, TOP_K, TOP_P, BatchState
from pagecast_worker.split_sampler import draw_from_shards
from pagecast_worker.staging import Packet, Staging
from pagecast_worker.step_outputs import Decoded, SampleInputs
from pagecast_worker.token_rules import Masks, StepRules, TokenRules

if TYPE_CHECKING:
    from pagecast_worker.torch_executor import TorchExecutor

MAX_PROMPT_LOGITS = 64
"""Prompt positions that go through the head at a time for their log-probabilities."""


def draw(executor: "TorchExecutor", hidden: Tensor, rows: SampleInputs) -> Decoded:
    """The plain draw of a step, for hidden[B, H]: what graphs capture, and what is compiled ahead. Its logits are the executor's buffer."""
    ops, model, state = executor.ops, executor.model, executor.state
    out = executor.logits[: hidden.shape[0]]
    if model.ranks.size > 1:
        return draw_from_shards(ops, model, state, hidden, rows, out)
    logits = model.logits(ops, hidden, out)
    return Decoded(sample_rows(ops, state, logits, rows), logits, rows)


def sample_rows(ops: Any, state: BatchState, logits: Tensor, rows: SampleInputs) -> Tensor:
    """Draw one token for each row of logits[B, V] and move the rows past it. Returns int32[2, B]: tokens, flags.

    Running it again over the same inputs gives the same result: lengths are set from the gathered ones, not counted up.
    """
    return ops.finish_rows(_draw(ops, logits, rows), rows.rows, rows.scalars[NUM_TOKENS], state.scalars, state.stops, FLAG_STOP, FLAG_BAD)


def _draw(ops: Any, logits: Tensor, rows: SampleInputs) -> Tensor:
    floats = rows.scalars.view(torch.float32)
    return ops.sample(
        logits, floats[TEMPERATURE], rows.scalars[TOP_K], floats[TOP_P], floats[MIN_P], rows.seeds, rows.scalars[SEQUENCE],
        rows.scalars[NUM_TOKENS],
    )  # fmt: skip


def follow_rules(
    ops: Any, state: BatchState, rules: TokenRules, decoded: Decoded, wanted: StepRules, staging: Staging, masks: Masks | None
) -> Tensor | None:
    """Corrects decoded.out where rows have rules. Returns the log-probabilities that rows ask for, as `logprob_columns` gives them.

    masks: of the rows under a constraint, which all stand in wanted.places.
    """
    if len(wanted.places):
        packet = Packet()
        packet.add(whole_words(wanted.places))
        packet.add(wanted.kinds)
        packet.add(np.full(len(wanted.places), -1) if masks is None else masks.index)
        if masks is not None:
            packet.add(masks.words)
        places, kinds, mask_index, *words = packet.upload(staging)
        draw_again(ops, state, rules, decoded, places, kinds, words[0] if words else rules.no_mask, mask_index)
    if not len(wanted.logprob_places):
        return None
    packet = Packet()
    packet.add(wanted.logprob_places)
    places = packet.upload(staging)[0].long()
    logits, tokens = decoded.logits.index_select(0, places), decoded.out[0].index_select(0, places)
    return logprob_columns(ops, logits, tokens, int(wanted.logprob_counts.max()))


def whole_words(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """places with its last one repeated up to a multiple of 4: rows of what is gathered by them then begin at multiples of 16 bytes, as
    kernels are compiled once more for pointers that do not."""
    return np.pad(places, (0, -len(places) % 4), mode="edge")


def draw_again(
    ops: Any, state: BatchState, rules: TokenRules, decoded: Decoded, places: Tensor, kinds: Tensor, masks: Tensor, mask_index: Tensor
) -> None:
    """For K rows of the step. places int32, filled up by `whole_words`; kinds int32[K], masks int32[M, W], mask_index int32[K]: see
    reference.adjust_logits.

    A row to which the rules leave no token is FLAG_DEAD; one whose logits were not numbers stays FLAG_BAD.
    """
    count, inputs, out = kinds.shape[0], decoded.rows, decoded.out
    padded = places.long()
    index = padded[:count]
    scalars = inputs.scalars.index_select(1, padded)[:, :count]
    mine = SampleInputs(inputs.rows.index_select(0, index), scalars, inputs.seeds.index_select(0, index))
    adjusted = ops.adjust_logits(
        decoded.logits, places[:count], mine.rows, kinds, rules.counts, rules.bias, rules.penalties, masks, mask_index
    )  # fmt: skip
    adjusted = ops.forbid_tokens(adjusted, mine.rows, kinds, rules.words, rules.recent, state.stops)
    drawn = _draw(ops, adjusted, mine)
    again = ops.finish_rows(drawn, mine.rows, scalars[NUM_TOKENS], state.scalars, state.stops, FLAG_STOP, FLAG_DEAD)
    ops.note_tokens(again[0], mine.rows, kinds, rules.counts, rules.recent)
    again[1] |= out[1].index_select(0, index) & FLAG_BAD
    out.index_copy_(1, index, again)


def logprob_columns(ops: Any, logits: Tensor, tokens: Tensor, num: int) -> Tensor:
    """int32[K, 1 + 2·num]: of tokens int32[K] under the log-softmax of logits[K, V] the values' float32 bits, then the num best ids, then
    their values' bits."""
    chosen, ids, best = ops.top_logprobs(logits, tokens, num)
    return torch.cat((chosen.unsqueeze(1).view(torch.int32), ids, best.view(torch.int32)), 1)


def prompt_logprobs(executor: "TorchExecutor", hidden: Tensor, tokens: Tensor, num: int) -> Tensor:
    """int32[K, 1 + 2·num], see logprob_columns, of a prompt's tokens int32[K], which hidden[K, H] foretells.

    As many logits at a time as a step may sample for, so that memory stays within what was measured.
    """
    pieces, size = [], min(len(executor.logits), MAX_PROMPT_LOGITS)
    for part, wanted in zip(hidden.split(size), tokens.split(size), strict=True):
        logits = executor.model.logits(executor.ops, part, executor.logits[: len(part)])
        pieces.append(logprob_columns(executor.ops, logits, wanted, num))
    return torch.cat(pieces)
