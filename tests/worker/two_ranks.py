"""A model split over two ranks, each a thread here that meets the other in every collective."""

import threading
from types import SimpleNamespace

import torch
from worker.family_model import PROMPT, Forward

from pagecast_worker import cpu_ops
from pagecast_worker.backend import is_quantized, products_over
from pagecast_worker.config import WorkerConfig
from pagecast_worker.kv_cache import KVCache
from pagecast_worker.layers.quantized import CpuQuantized
from pagecast_worker.loading.load import load_model, open_checkpoint
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

    def __init__(self, folder, rank, board, barrier, options):
        self.config = WorkerConfig(
            run_dir="/unused", model=str(folder), rank=rank, tensor_parallel_size=RANKS, device="cpu", max_model_len=96, **options
        )
        ranks = Ranks(rank, RANKS, Threads(rank, board, barrier))
        with torch.inference_mode():
            self.model = load_model(
                self.config, open_checkpoint(self.config, CPU), ranks, CPU, torch.float32, lambda progress: None
            ).model
            self.cache = KVCache(24, self.model.config.num_layers, self.model.kv_shape, self.config.block_size, CPU, torch.float32)
        self.ops = cpu_ops
        if is_quantized(self.model):
            self.ops = SimpleNamespace(**{**vars(cpu_ops), **products_over(CpuQuantized(cpu_ops))})


def halves_of(folder, **options):
    board, barrier = [None] * RANKS, threading.Barrier(RANKS)
    return [Half(folder, rank, board, barrier, options) for rank in range(RANKS)]


def logits_of_two(folder, decodes=(), **options):
    """Each rank's logits [T, V] of PROMPT and of the tokens after it."""
    halves = halves_of(folder, **options)
    found = [None] * RANKS

    def run(rank):
        forward = Forward(halves[rank])
        found[rank] = torch.cat([forward.chunk(PROMPT), *(forward.decode(token) for token in decodes)])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
