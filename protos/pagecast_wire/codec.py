"""Encoding of every message between processes: one tagged struct, msgpack, size cap, exact version.

Unknown fields and unknown tags are refused. Columns are little-endian and become NumPy arrays without a copy. WIRE_DIGEST
changes whenever a struct does; two processes talk only if version and digest agree (there is no negotiation: both ends ship in
one wheel).
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagecast_wire import control, plan, result

WIRE_VERSION = 1

MAX_BYTES = {"from_frontend": 32 << 20, "to_frontend": 64 << 20, "to_worker": 256 << 20, "from_worker": 64 << 20}
"""Largest accepted message per direction, in bytes."""

_DIRECTIONS: dict[str, Any] = {
    "from_frontend": control.FromFrontend,
    "to_frontend": control.ToFrontend,
    "to_worker": plan.ToWorker,
    "from_worker": result.FromWorker,
}
_IS_LITTLE = sys.byteorder == "little" and array("I").itemsize == 4
_encoder = msgspec.msgpack.Encoder()


class WireError(ValueError):
    """A message that is not one of ours: too large, unknown tag, wrong or extra field. The text holds no payload."""


@cache
def _decoder(direction: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_DIRECTIONS[direction])


def encode(message: msgspec.Struct) -> bytes:
    """msgpack bytes of one tagged struct."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, direction: str) -> Any:
    """The struct in `data`. direction: a key of MAX_BYTES. Raises WireError, whatever the bytes are."""
    if len(data) > MAX_BYTES[direction]:
        raise WireError(f"message of {len(data)} bytes exceeds the cap of {MAX_BYTES[direction]} for {direction}")
    try:
        return _decoder(direction).decode(data)
    except (ValueError, msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise WireError(f"malformed {direction} message: {type(error).__name__}") from None


def pack_u32(values: Any) -> bytes:
    """Little-endian u32 column of a sequence or array of integers. Raises OverflowError for one that does not fit."""
    if isinstance(values, list):  # the array module is several times faster on short lists
        return array("I", values).tobytes() if _IS_LITTLE else np.array(values, "<u4").tobytes()
    return np.ascontiguousarray(values, dtype="<u4").tobytes()


def pack_u64(values: Any) -> bytes:
    """Little-endian u64 column of a sequence or array of integers."""
    return np.ascontiguousarray(values, dtype="<u8").tobytes()


def _view(column: bytes, dtype: str, width: int) -> NDArray[Any]:
    if len(column) % width:
        raise WireError(f"column of {len(column)} bytes is not a multiple of {width}")
    return np.frombuffer(column, dtype=dtype)


def view_u32(column: bytes) -> NDArray[np.uint32]:
    """Read-only array over a u32 column, without a copy."""
    return _view(column, "<u4", 4)


def view_u64(column: bytes) -> NDArray[np.uint64]:
    """Read-only array over a u64 column, without a copy."""
    return _view(column, "<u8", 8)


def _describe(info: Any, seen: set[type]) -> str:
    """A stable text of a type's shape, following struct-typed fields; a struct met before is only named."""
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls in seen:
            return info.cls.__name__
        seen.add(info.cls)
        fields = ",".join(f"{f.encode_name}:{_describe(f.type, seen)}={f.default!r}" for f in info.fields)
        return f"{info.cls.__name__}[{info.tag}]({fields})"
    if isinstance(info, msgspec.inspect.UnionType):
        return "|".join(_describe(t, seen) for t in info.types)
    if isinstance(info, msgspec.inspect.VarTupleType):
        return f"[{_describe(info.item_type, seen)}]"
    if isinstance(info, msgspec.inspect.EnumType):
        return f"{info.cls.__name__}({','.join(f'{m.name}={m.value}' for m in info.cls)})"
    return type(info).__name__


def digest_of(types: Iterable[Any]) -> str:
    """Sixteen hex digits over the shape of `types`: names, tags, fields in order, their types and defaults, enum values."""
    described = "\n".join(_describe(msgspec.inspect.type_info(t), set()) for t in types)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


WIRE_DIGEST = digest_of(_DIRECTIONS.values())
"""Hex digest of every struct's shape, compared in each hello."""
