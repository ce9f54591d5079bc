"""Made-up weights of a real shape, for measuring speed: a folder needs only its config.json."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.models.weights import Source

STD = 0.02
SEED = 20251129


class RandomWeights:
    """Makes tensors on their device, whole ones, whatever part of them a rank keeps: values do not depend on the number of ranks.

    Never zeros, whose products draw less power and so run faster than real ones.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.config, self.scheme = read_config(folder)
        if self.scheme is not None:
            raise LoadError(f"{folder}: random weights are not made quantized; leave quantization_config out and give quantization")
        self._generator = torch.Generator(device=device)

    def fill(self, source: Source) -> None:
        """Normal with standard deviation 0.02; norm weights (one dimension) around 1, biases around 0. Values follow from the name."""
        seed = hashlib.sha256(f"{SEED} {source.name} {source.take}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(seed[:7], "little"))
        whole = torch.empty((source.rows(), *source.shape[1:]), dtype=source.parameter.dtype, device=self._generator.device)
        mean = 1.0 if whole.dim() == 1 and not source.name.endswith("bias") else 0.0
        whole.normal_(mean, STD, generator=self._generator)
        part = whole if source.part is None else source.part.of(whole)
        source.place().copy_(part)

    def made(self, source: Source, device: torch.device) -> Tensor:
        """The same for a parameter that has no memory."""
        made = torch.empty(source.place().shape, dtype=source.parameter.dtype, device=device)
        return made.normal_(0.0, STD, generator=self._generator)

    def identity(self) -> str:
        """Hex SHA-256 of the configuration and the seed."""
        text = json.dumps(asdict(self.config), sort_keys=True) + f" random {SEED} {STD}"
        return hashlib.sha256(text.encode()).hexdigest()
