"""Steps as they are captured in graphs and compiled ahead: a decode step, a padded one with chunks, and those that a start tries.

Of an executor they take operators, model, state, cache and configuration alone: `precompile` has them in its place.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagecast_worker.inputs import decode_inputs, padded_inputs, sample_inputs
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.mixed_graphs import PaddedStep
from pagecast_worker.sampler import draw, draw_again, logprob_columns, sample_rows
from pagecast_worker.sharing import SharedOnDevice
from pagecast_worker.step_outputs import Decoded

if TYPE_CHECKING:
    from pagecast_worker.torch_executor import TorchExecutor


def decode_step(executor: "TorchExecutor", rows: Tensor, shared: SharedOnDevice | None = None) -> Decoded:
    """One decode step of rows int32[B]. shared: prefixes to read once."""
    step, sampling = decode_inputs(executor.ops, executor.state, rows, executor.config.block_size)
    step.shared = shared
    return draw(executor, executor.model.forward(executor.ops, step, executor.cache.layers), sampling)


def padded_step(executor: "TorchExecutor", padded: PaddedStep) -> Decoded:
    """One padded step with prefill chunks."""
    step, sampling = padded_inputs(executor.ops, executor.state, padded, executor.config.block_size)
    return draw(executor, executor.model.forward(executor.ops, step, executor.cache.layers), sampling)


def try_sizes(executor: "TorchExecutor", sizes: Iterable[int]) -> None:
    """A decode step of each of these sizes, prompts as short, rules and a block copied, on the padding row: what serving runs has run."""
    null = torch.zeros(1, dtype=torch.int32, device=executor.device)
    executor.cache.copy(executor.ops, null, null)
    prefill_step(executor, 2, 2, 1)
    for size in sizes:
        prefill_step(executor, size, 1, size)
        decode_step(executor, torch.full((size,), executor.state.padding, dtype=torch.int32, device=executor.device))


def prefill_step(executor: "TorchExecutor", tokens: int, length: int, rows: int, *, whole: bool = False) -> None:
    """Prefill `tokens` in chunks of `length` and sample for `rows` rows, all of them the padding row. Writes no KV.

    whole: all hidden states are computed, as where a prompt's log-probabilities are wanted.
    """
    device, state = executor.device, executor.state
    starts = torch.arange(0, tokens + length, length, device=device, dtype=torch.int32).clamp_(max=tokens)
    lengths = starts[1:] - starts[:-1]
    step = StepInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
        positions=torch.arange(tokens, dtype=torch.int32, device=device) % length,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        block_table=state.table,
        num_decodes=0,
        decode_rows=lengths[:0],
        decode_seq_lens=lengths[:0],
        num_prefills=len(lengths),
        prefill_rows=torch.full_like(lengths, state.padding),
        prefill_seq_lens=lengths,
        query_start_loc=starts,
        max_query_len=length,
        wanted=None if whole else torch.zeros(rows, dtype=torch.int64, device=device),
    )
    hidden = executor.model.forward(executor.ops, step, executor.cache.layers)
    sampled = hidden[:1].expand(rows, -1).contiguous() if whole else hidden
    logits = executor.model.logits(executor.ops, sampled, executor.logits[:rows])
    padding = torch.full((rows,), state.padding, dtype=torch.int32, device=device)
    inputs = sample_inputs(executor.ops, state, padding, executor.config.block_size)
    follow_no_rules(executor, Decoded(sample_rows(executor.ops, state, logits, inputs), logits, inputs))


def follow_no_rules(executor: "TorchExecutor", decoded: Decoded) -> None:
    """Draw again for every row of a step, by rules that ask for nothing, and tell its log-probabilities."""
    device, rules = executor.device, executor.rules
    rows = decoded.out.shape[1]
    places = torch.arange(-(-rows // 4) * 4, dtype=torch.int32, device=device).clamp_(max=rows - 1)
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    draw_again(executor.ops, executor.state, rules, decoded, places, none, rules.no_mask, none - 1)
    logprob_columns(executor.ops, decoded.logits, decoded.out[0].clone(), 1)
