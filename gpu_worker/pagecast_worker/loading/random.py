"""Made-up weights of a real shape, for measuring speed: a folder needs only its config.json."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch

from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.models.weights import Source

STD = 0.02
SEED = 20251129


class RandomWeights:
    """Fills parameters in place on their device; never zeros, whose products draw less power and so run faster than real ones."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.config = read_config(folder)
        self._generator = torch.Generator(device=device).manual_seed(SEED)

    def fill(self, source: Source) -> None:
        """Normal with standard deviation 0.02; norm weights (one dimension) around 1, biases around 0."""
        split = source.part is not None and source.part.dim == 0
        own = source.parameter.narrow(0, source.row, source.part.size if split and source.part else source.rows())
        mean = 1.0 if own.dim() == 1 and not source.name.endswith("bias") else 0.0
        own.normal_(mean, STD, generator=self._generator)

    def identity(self) -> str:
        """Hex SHA-256 of the configuration and the seed."""
        text = json.dumps(asdict(self.config), sort_keys=True) + f" random {SEED} {STD}"
        return hashlib.sha256(text.encode()).hexdigest()
