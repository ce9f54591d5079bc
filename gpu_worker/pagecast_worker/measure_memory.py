"""What a model's weights take on the GPU, and how many blocks of KV are left: a model is loaded, looked at and dropped."""

from typing import Any

import torch

from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor


def weights_and_blocks(shape: str, options: dict[str, Any]) -> tuple[int, int]:
    """(bytes of all weights, blocks) of random weights of the config.json in folder `shape`. options: further fields of WorkerConfig."""
    config = WorkerConfig(run_dir="", model="random", random_weights=shape, device="cuda", enforce_eager=True, **options)
    before, executor = torch.cuda.memory_allocated(), TorchExecutor(config)
    _, num_blocks = executor.load(lambda progress: None)
    num_bytes = torch.cuda.memory_allocated() - before - sum(part.nbytes for part in [*executor.cache.storage, executor.logits])
    executor.close()
    del executor
    torch.cuda.empty_cache()
    return num_bytes, num_blocks
