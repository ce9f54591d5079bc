"""From a path to a model whose weights are on the device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pagecast_wire.intake import LoadProgress
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError, ReportProgress
from pagecast_worker.loading.checkpoint import Checkpoint, check_names
from pagecast_worker.loading.gguf import GgufCheckpoint
from pagecast_worker.loading.random import RandomWeights
from pagecast_worker.loading.safetensors import SafetensorsCheckpoint
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.llama import Llama
from pagecast_worker.models.registry import model_class
from pagecast_worker.parallel import Ranks

LEFT_OVER = (".rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that some checkpoints carry and nothing reads: angles are computed, and a tied head is the embedding."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to compute, and the hex digest of what it was made from."""

    model: Llama
    digest: str


def open_checkpoint(config: WorkerConfig, device: torch.device) -> Checkpoint | RandomWeights:
    """Reads headers and configuration only. Raises LoadError."""
    if config.random_weights is not None:
        return RandomWeights(Path(config.random_weights), device)
    path = Path(config.model)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.is_file():
        raise LoadError(f"{path}: no such file or folder")
    return GgufCheckpoint(path)


def max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    """The longest sequence in tokens. Raises LoadError where more is asked than the model knows positions for."""
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise LoadError(f"max_model_len must be at most {model.max_position} for this model, got {config.max_model_len}")
    return config.max_model_len or model.max_position


def load_model(
    config: WorkerConfig, checkpoint: Checkpoint | RandomWeights, device: torch.device, dtype: torch.dtype, report: ReportProgress
) -> Loaded:
    """Allocate and fill. Reports bytes of weights under phase "weights"."""
    ranks = Ranks(config.rank, config.tensor_parallel_size)
    made = model_class(checkpoint.config.architecture)
    model = made(checkpoint.config, ranks, device, dtype, max_model_len(config, checkpoint.config))
    sources = list(model.sources())
    if not isinstance(checkpoint, RandomWeights):
        check_names(checkpoint, {source.name for source in sources}, LEFT_OVER)
    total = sum(source.parameter.nbytes for source in sources if source.row == 0)
    done = 0
    for source in sources:
        if isinstance(checkpoint, RandomWeights):
            if source.row == 0:
                checkpoint.fill(source.parameter)
        else:
            value = checkpoint.tensor(source.name, source.shape)
            part = value if source.part is None else source.part.of(value)
            source.parameter.narrow(0, source.row, part.shape[0]).copy_(part)
        if source.row == 0:
            done += source.parameter.nbytes
            report(LoadProgress(rank=config.rank, phase="weights", done=done, total=total))
    return Loaded(model, checkpoint.identity())
