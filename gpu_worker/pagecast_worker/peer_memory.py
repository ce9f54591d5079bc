"""Collectives between the GPUs of one host through memory that they share, for messages small enough that NCCL's latency would be most
of their time. Everything else, and every host or driver where memory cannot be shared, goes through NCCL."""

from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from pagecast_kernels import configs
from pagecast_kernels.all_reduce import MAX_PROGRAMS, TILE, Peers, all_reduce, all_reduce_add_rms_norm, peers_over, shared_bytes
from pagecast_worker.parallel import ByTorch, Collectives, Ranks

_log = structlog.get_logger(__name__)


def device_collectives(ranks: Ranks, device: torch.device, hidden: int, dtype: torch.dtype) -> Collectives:
    """Collectives of ranks that each have a GPU of their own on this host; by NCCL alone where their memory cannot be shared.

    hidden: elements of a row that is normed after its sum; dtype: of what is summed. Every rank calls it at the same time."""
    if not _reachable(ranks):
        return ranks.collectives
    try:
        made = PeerMemory(ranks, device, hidden, dtype)
    except RuntimeError as error:
        _log.warning("memory cannot be shared between GPUs", error=str(error).splitlines()[0])
        return ranks.collectives
    _log.info("GPUs share memory for small sums", ranks=ranks.size)
    return made


def _reachable(ranks: Ranks) -> bool:
    """Whether every GPU may read every other one's memory; the same answer on every rank."""
    own = torch.cuda.current_device()
    others = [device for device in range(torch.cuda.device_count()) if device != own]
    yes = len(others) >= ranks.size - 1 and all(torch.cuda.can_device_access_peer(own, device) for device in others)
    return ranks.all_agree(yes)


class PeerMemory(ByTorch):
    """NCCL's collectives, but small sums by kernels of our own. Calls come in the same order on every rank, on one stream."""

    def __init__(
        self, ranks: Ranks, device: torch.device, hidden: int, dtype: torch.dtype, limits: configs.AllReduce | None = None
    ) -> None:
        """Raises RuntimeError, on every rank, where memory cannot be shared. limits: in place of the measured ones."""
        super().__init__(device)
        self._dtype = dtype
        self._limits = limits or configs.all_reduce(ranks.size)
        self.flat = _share(ranks, device, TILE, MAX_PROGRAMS, dtype)
        self.rows = _share(ranks, device, -(-hidden // 8) * 8, self._limits.fused_rows, dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if not self._is_small(tensor):
            return super().all_reduce(tensor)
        return all_reduce(tensor, self.flat, two_shots=tensor.nbytes > self._limits.one_shot)

    def add(self, ops: Any, x: Tensor, residual: Tensor) -> None:
        if self._is_small(x) and residual.is_contiguous():
            all_reduce(x, self.flat, residual, two_shots=x.nbytes > self._limits.one_shot)
        else:
            super().add(ops, x, residual)

    def add_rms_norm(self, ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._is_small(x) and x.shape[0] <= self.rows.places and x.shape[1] <= self.rows.width:
            return all_reduce_add_rms_norm(x, residual, weight, eps, self.rows, out=x)
        return super().add_rms_norm(ops, x, residual, weight, eps)

    def _is_small(self, tensor: Tensor) -> bool:
        most = max(self._limits.one_shot, self._limits.two_shots)
        return tensor.dtype == self._dtype and tensor.is_contiguous() and tensor.nbytes <= most


def _share(ranks: Ranks, device: torch.device, width: int, places: int, dtype: torch.dtype) -> Peers:
    """Memory that every rank can read, as a kernel takes it. Raises RuntimeError on every rank if any of them fails."""
    try:
        memory, handle = _rendezvous(device, shared_bytes(width, places, dtype.itemsize))
    except RuntimeError:
        ranks.all_agree(False)
        raise
    if not ranks.all_agree(True):  # nobody writes before all is zero
        raise RuntimeError("another rank could not share its memory")
    return peers_over([int(address) for address in handle.buffer_ptrs], ranks.rank, width, places, device, (memory, handle))


def _rendezvous(device: torch.device, nbytes: int) -> tuple[Tensor, Any]:
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory, handle
