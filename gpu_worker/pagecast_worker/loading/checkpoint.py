"""What a checkpoint offers to a model, whatever its format: a configuration and tensors by their Hugging Face names."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.models.config import ModelConfig


class Checkpoint(Protocol):
    """An opened checkpoint. Opening reads headers only; `tensor` reads one tensor."""

    config: ModelConfig
    scheme: Scheme | None
    """How its weights are quantized, where they are."""

    def names(self) -> Iterable[str]:
        """Every tensor in the checkpoint, by its Hugging Face name."""

    def file_of(self, name: str) -> str:
        """The file that holds (or ought to hold) a tensor, for messages."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the CPU in its stored float type, of exactly this shape. Raises LoadError naming file and tensor."""

    def raw(self, name: str) -> Tensor:
        """A tensor on the CPU as it is stored, whatever its type and shape. Raises LoadError."""

    def verify(self) -> None:
        """Check the files against a manifest of digests, if there is one. Raises LoadError."""

    def identity(self) -> str:
        """Hex SHA-256 over what the weights are: configuration, names, shapes, types and a sample of every file's bytes."""


def check_shape(file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises LoadError where a tensor's shape is not the one that the configuration asks for."""
    if found != wanted:
        raise LoadError(f"{file}: tensor {name} has shape {list(found)}, the configuration asks for {list(wanted)}")


def check_names(checkpoint: Checkpoint, wanted: set[str], ignored: tuple[str, ...] = (), beginnings: tuple[str, ...] = ()) -> None:
    """Raises LoadError for the first missing tensor, else for the first one that nothing uses.

    ignored, beginnings: how names may end, or begin, of tensors that may be left over.
    """
    names = set(checkpoint.names())
    for name in sorted(wanted - names):
        raise LoadError(f"{checkpoint.file_of(name)}: tensor {name} is missing")
    for name in sorted(names - wanted):
        if not name.endswith(ignored or ("\0",)) and not name.startswith(beginnings or ("\0",)):
            raise LoadError(f"{checkpoint.file_of(name)}: tensor {name} belongs to nothing in a {checkpoint.config.architecture}")


def file_sample(path: Path) -> bytes:
    """Size, first and last MiB of a file: enough to tell two checkpoints apart without reading gigabytes."""
    chunk, size = 1 << 20, path.stat().st_size
    with path.open("rb") as file:
        head = file.read(chunk)
        file.seek(max(size - chunk, 0))
        return size.to_bytes(8, "little") + head + file.read(chunk)


def dtype_named(name: str) -> torch.dtype:
    """The torch type of "float32", "bfloat16" or "float16". Raises LoadError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise LoadError(f"dtype must be one of auto, {', '.join(known)}, got {name!r}")
    return known[name]
