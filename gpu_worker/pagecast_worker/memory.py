"""How many KV blocks fit: on a GPU what a real peak step leaves of the allowed share, on a CPU what the operator grants."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.graphs import sizes_of_sharing
from pagecast_worker.outset import MIN_BLOCKS, granted_blocks
from pagecast_worker.steps import prefill_step

if TYPE_CHECKING:
    from pagecast_worker.models.decoder import Decoder
    from pagecast_worker.torch_executor import TorchExecutor

GRAPH_LAYER_BYTES = 64 << 10
"""Bytes of the driver's for each layer of a captured step: of 32 layers, 40 graphs took less than half of it (H200)."""
SEGMENT_BYTES = 64 << 20
"""Bytes kept for what the allocator rounds up in graphs' memory."""

_log = structlog.get_logger(__name__)


def logits_of_a_step(rows: int, model: "Decoder") -> Tensor:
    """The buffer [rows, V / ranks] of every step's logits: graphs would otherwise hold one of their own each."""
    return torch.empty((rows, model.vocabulary.size), dtype=model.dtype, device=model.device)


def num_blocks_for(
    config: WorkerConfig, device: torch.device, bytes_per_block: int, peak: Callable[[], None], later: Mapping[str, int]
) -> int:
    """Blocks of the pool, null block included. later: bytes that are allocated later, by what for. Raises LoadError where not even
    one fits."""
    if device.type == "cpu":
        return granted_blocks(config, bytes_per_block)
    if config.num_blocks is not None:
        return config.num_blocks
    torch.cuda.empty_cache()
    activations = most_allocated(device, peak)
    free, total = torch.cuda.mem_get_info(device)
    tensors = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - tensors
    in_use = total - free - unused  # weights, state, the context, and other processes
    torch.cuda.empty_cache()
    left = int(total * config.gpu_memory_utilization) - in_use - activations - sum(later.values())
    parts = {"in_use": in_use, "of_it_tensors": tensors, "of_a_step": activations, "in_its_fragments": unused - activations, **later}
    mib = {name: value >> 20 for name, value in parts.items()}
    _log.info("memory measured", **mib, for_blocks=left >> 20, total=total >> 20, unit="MiB")
    count = left // bytes_per_block
    if count < MIN_BLOCKS:
        raise LoadError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total >> 20} MiB leaves no room for KV blocks: "
            f"{in_use >> 20} MiB are in use and a step takes {activations >> 20} MiB"
        )
    return count


def most_allocated(device: torch.device, step: Callable[[], None]) -> int:
    """Bytes that a step takes at most, beyond what there is before it."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def graph_reserve(executor: "TorchExecutor") -> int:
    """Bytes kept for graphs: what the largest captured step takes, which serves all as at most one of them runs at a time, and what
    the driver keeps of each.

    Where they need more, graphs of steps with chunks are left out, and those of decode steps end the start with an error.
    """
    if not executor.backend.use_graphs:
        return 0
    decode, mixed = executor.graph_sizes()
    tokens = max(size.tokens for size in mixed)
    length = min(tokens, executor.max_model_len)
    activations = most_allocated(executor.device, lambda: prefill_step(executor, tokens, length, 1, whole=True))
    count = len(decode) + len(sizes_of_sharing(decode)) + len(mixed)
    return activations + SEGMENT_BYTES + count * executor.model.config.num_layers * GRAPH_LAYER_BYTES


def peak_step(executor: "TorchExecutor") -> None:
    """The largest step there can be: a full token budget of prefill, all of its hidden states, and logits and samples of every row."""
    tokens, rows = executor.config.max_num_batched_tokens, executor.config.max_num_seqs
    if executor.device.type == "cpu":
        tokens, rows = min(tokens, 64), 1  # nothing is measured here, only warmed up
    prefill_step(executor, tokens, min(tokens, executor.max_model_len), rows, whole=True)
