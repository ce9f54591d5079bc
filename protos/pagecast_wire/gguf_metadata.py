"""Reads the metadata of a GGUF file (version 2 or 3, little-endian), nothing else: the tokenizer needs no tensor.

Layout, from the format's published description: magic "GGUF", u32 version, u64 tensor count, u64 key count, then per key a
string (u64 length, bytes), a u32 type and the value; an array is a u32 element type, a u64 length and the elements.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not a GGUF file this reader understands."""


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def scalar(self, fmt: str) -> Any:
        """One value of a struct format."""
        (value,) = struct.unpack_from(fmt, self._data, self._at)
        self._at += struct.calcsize(fmt)
        return value

    def text(self) -> str:
        """A length-prefixed string; bytes that are not UTF-8 are replaced."""
        start = self._at + 8
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        if length > len(self._data) - start:
            raise GgufError("a string runs past the end of the file")
        self._at = start + length
        return self._data[start : self._at].decode("utf-8", "replace")

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
            values = list(struct.unpack_from(fmt, self._data, self._at))
            self._at += struct.calcsize(fmt)
            return values
        return [self.value(element) for _ in range(length)]


def read_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file. Raises GgufError; OSError when it cannot be read."""
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
                cursor.scalar("<Q")
                return {cursor.text(): cursor.value(cursor.scalar("<I")) for _ in range(cursor.scalar("<Q"))}
            except struct.error:
                raise GgufError("the metadata is cut off") from None
