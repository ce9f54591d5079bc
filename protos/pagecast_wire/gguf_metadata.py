"""Reads the head of a GGUF file (version 2 or 3, little-endian): its metadata, and where its tensors are.

Layout, from the format's published description: magic "GGUF", u32 version, u64 tensor count, u64 key count, then per key a
string (u64 length, bytes), a u32 type and the value; an array is a u32 element type, a u64 length and the elements. Then per tensor its
name as a string, a u32 number of dimensions, u64 each of them, the fastest first, a u32 type and a u64 offset, which counts from the
first multiple of the alignment (general.alignment, 32 if missing) after all that.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MOST_DIMS = 4
_ALIGNMENT = "general.alignment"


class GgufError(ValueError):
    """The file is not a GGUF file this reader understands."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the head says of one tensor. dims: fastest first; kind: GGML's number of its type; start: byte of the file."""

    name: str
    dims: tuple[int, ...]
    kind: int
    start: int


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def scalar(self, fmt: str) -> Any:
        """One value of a struct format."""
        (value,) = struct.unpack_from(fmt, self._data, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def text(self) -> str:
        """A length-prefixed string; bytes that are not UTF-8 are replaced."""
        start = self.at + 8
        (length,) = struct.unpack_from("<Q", self._data, self.at)
        if length > len(self._data) - start:
            raise GgufError("a string runs past the end of the file")
        self.at = start + length
        return self._data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value of a GGUF type number; arrays become lists."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise GgufError(f"unknown value type {kind}")
        element, length = self.scalar("<I"), self.scalar("<Q")
        if length > len(self._data):
            raise GgufError("an array runs past the end of the file")
        if element in _SCALARS:
            fmt = f"<{length}{_SCALARS[element][1]}"
            values = list(struct.unpack_from(fmt, self._data, self.at))
            self.at += struct.calcsize(fmt)
            return values
        return [self.value(element) for _ in range(length)]

    def tensor(self) -> TensorEntry:
        """An entry as it stands: its start counts from the beginning of the tensors."""
        name, num_dims = self.text(), self.scalar("<I")
        if num_dims > MOST_DIMS:
            raise GgufError(f"tensor {name} has {num_dims} dimensions, at most {MOST_DIMS}")
        return TensorEntry(name, tuple(self.scalar("<Q") for _ in range(num_dims)), self.scalar("<I"), self.scalar("<Q"))


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file. Raises GgufError; OSError when it cannot be read."""
    with _opened(path) as cursor:
        cursor.scalar("<Q")
        return _metadata(cursor)


def read_head(path: Path) -> tuple[dict[str, Any], list[TensorEntry]]:
    """The metadata and every tensor's entry, none of which is compared with the file's size. Raises as read_metadata does."""
    with _opened(path) as cursor:
        num_tensors = cursor.scalar("<Q")
        metadata = _metadata(cursor)
        entries = [cursor.tensor() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            raise GgufError(f"{_ALIGNMENT} must be a power of two")
        data = -(-cursor.at // alignment) * alignment
    if len({entry.name for entry in entries}) < len(entries):
        raise GgufError("two tensors have one name")
    return metadata, [TensorEntry(entry.name, entry.dims, entry.kind, data + entry.start) for entry in entries]


@contextmanager
def _opened(path: Path) -> Iterator[_Cursor]:
    """The file from behind its version."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise GgufError("the file does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            try:
                cursor.scalar("<I")
                version = cursor.scalar("<I")
                if version not in (2, 3):
                    raise GgufError(f"GGUF version {version} is not supported")
                yield cursor
            except struct.error:
                raise GgufError("the metadata is cut off") from None


def _metadata(cursor: _Cursor) -> dict[str, Any]:
    return {cursor.text(): cursor.value(cursor.scalar("<I")) for _ in range(cursor.scalar("<Q"))}
