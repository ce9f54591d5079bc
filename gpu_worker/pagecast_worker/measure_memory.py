"""What a model's weights take on the GPU, and how many blocks of KV are left: a model is loaded, looked at and dropped."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.config import WorkerConfig
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.torch_executor import TorchExecutor


def weights_and_blocks(shape: str, options: dict[str, Any]) -> tuple[int, int]:
    """(bytes of all weights, blocks) of random weights of the config.json in folder `shape`. options: further fields of WorkerConfig."""
    config = WorkerConfig(run_dir="", model="random", random_weights=shape, enforce_eager=True, **options)
    executor = TorchExecutor(config)
    _, num_blocks = executor.load(lambda progress: None)
    num_bytes = weight_bytes(executor.model)
    executor.close()
    del executor
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return num_bytes, num_blocks


def weight_bytes(model: Decoder) -> int:
    """Of all that was read or made from a checkpoint, scales and zeros included."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors([model.embedding, model.head, model.norm, model.layers])}
    return sum(tensors.values())


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            if field.name not in ("ranks", "cos_sin"):
                yield from _tensors(getattr(part, field.name))
