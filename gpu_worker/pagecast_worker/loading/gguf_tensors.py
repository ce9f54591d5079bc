"""The tensors of a GGUF file as they are stored, mapped and not read.

The gguf package's own reader makes an array of every value of the metadata, which for a vocabulary of 49,152 tokens takes seconds; here
they come from the head as the wire's reader finds it. What types there are, and how to de-quantize them, is the package's to know.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from pagecast_wire.gguf_metadata import TensorEntry
from pagecast_worker.executor import LoadError

_PLAIN: dict[str, Any] = {
    "F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dims: fastest first, as the file has them. data: [slowest, ..., fastest] values, or bytes of a type that numpy does not know."""

    name: str
    kind: gguf.GGMLQuantizationType
    dims: tuple[int, ...]
    data: NDArray[Any]


def stored_tensors(path: Path, entries: Iterable[TensorEntry]) -> list[StoredTensor]:
    """In the file's order. Raises LoadError naming the tensor whose type is unknown or whose bytes are not all there; OSError."""
    mapped = np.memmap(path, np.uint8, "r")
    return [_stored(path, mapped, entry) for entry in entries]


def _stored(path: Path, mapped: NDArray[np.uint8], entry: TensorEntry) -> StoredTensor:
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
    except ValueError:
        raise LoadError(f"{path}: tensor {entry.name} is of type {entry.kind}, which is unknown") from None
    shape, plain = tuple(reversed(entry.dims)), _PLAIN.get(kind.name)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % per_block:
        raise LoadError(f"{path}: tensor {entry.name} has rows of {shape[-1]} values, {kind.name} has blocks of {per_block}")
    num_bytes = prod(shape) // per_block * block_bytes
    if entry.start + num_bytes > len(mapped):
        raise LoadError(f"{path}: not a readable GGUF file (tensor {entry.name} runs past its end)")
    data: NDArray[Any] = mapped[entry.start : entry.start + num_bytes]
    if plain is not None:
        return StoredTensor(entry.name, kind, entry.dims, data.view(plain).reshape(shape))
    return StoredTensor(entry.name, kind, entry.dims, data.reshape(gguf.quant_shape_to_byte_shape(shape, kind)))
