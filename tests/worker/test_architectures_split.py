"""Every family split over two ranks, each a thread here that meets the other in every collective: the logits are transformers'."""

import threading

import pytest
import torch
from worker.family_model import PROMPT, Forward, expected_logits, write_family

from pagecast_worker import cpu_ops
from pagecast_worker.config import WorkerConfig
from pagecast_worker.kv_cache import KVCache
from pagecast_worker.loading.load import load_model, open_checkpoint
from pagecast_worker.models.registry import architectures
from pagecast_worker.parallel import Ranks

CPU = torch.device("cpu")
RANKS = 2


class Threads:
    """Collectives between threads of one process. Every rank has its own; `board` and `barrier` are shared."""

    def __init__(self, rank, board, barrier):
        self._rank, self._board, self._barrier = rank, board, barrier

    def _exchange(self, tensor):
        self._board[self._rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        every = list(self._board)
        self._barrier.wait(timeout=60)
        return every

    def all_reduce(self, tensor):
        return tensor.copy_(sum(self._exchange(tensor)))

    def add_rms_norm(self, ops, x, residual, weight, eps):
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, tensor, size):
        return torch.stack(self._exchange(tensor))

    def tensor(self, value):
        return torch.tensor([value])


class Half:
    """What Forward needs of an executor, for one rank."""

    def __init__(self, folder, rank, board, barrier):
        self.config = WorkerConfig(
            run_dir="/unused", model=str(folder), rank=rank, tensor_parallel_size=RANKS, device="cpu", max_model_len=96
        )
        ranks = Ranks(rank, RANKS, Threads(rank, board, barrier))
        with torch.inference_mode():
            self.model = load_model(
                self.config, open_checkpoint(self.config, CPU), ranks, CPU, torch.float32, lambda progress: None
            ).model
            self.cache = KVCache(24, self.model.config.num_layers, self.model.kv_shape, self.config.block_size, CPU, torch.float32)
        self.ops = cpu_ops


@pytest.mark.parametrize("name", sorted(architectures()))
def test_two_ranks_compute_what_transformers_computes(tmp_path, name):
    folder, model = write_family(name, tmp_path)
    ids, logits = expected_logits(model, PROMPT, 2)
    board, barrier = [None] * RANKS, threading.Barrier(RANKS)
    halves = [Half(folder, rank, board, barrier) for rank in range(RANKS)]
    found = [None] * RANKS

    def run(rank):
        forward = Forward(halves[rank])
        found[rank] = torch.cat([forward.chunk(PROMPT), forward.decode(ids[-2]), forward.decode(ids[-1])])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got in found:
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)
