"""The last events of a failed run as short lines: only fields that differ from their defaults, columns as numbers."""

from typing import Any

import msgspec

from pagecast_wire.codec import view_u32, view_u64


def line(entry: tuple[Any, ...]) -> str:
    """One trace entry: (what, virtual microseconds, details ...)."""
    what, at, *details = entry
    return f"{at:>8} {what:<8} " + " ".join(_show(detail) for detail in details)


def _show(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        default = {f.name: f.default for f in msgspec.structs.fields(value)}
        shown = {name: getattr(value, name) for name in value.__struct_fields__}
        inner = ", ".join(f"{name}={_field(name, v)}" for name, v in shown.items() if v != default[name])
        return f"{type(value).__name__}({inner})"
    return str(value)


def _field(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        if name == "flags":
            return str(list(value))
        return str((view_u64 if name == "keys" else view_u32)(value).tolist())
    if isinstance(value, tuple):
        return "[" + "; ".join(_show(item) for item in value) + "]"
    return _show(value)
