"""What a step says of some requests, once more for readers that the core does not know: batches cut up by column and put together."""

import msgspec

from pagecast_wire.intake import KEY_BITS, FrontendBatch

_COLUMNS = {"keys": 8, "sequences": 4, "offsets": 4, "counts": 4}
"""Columns of a batch with one entry per sequence, and the bytes of each."""


def add_copies(batches: list[tuple[int, FrontendBatch]], readers: dict[int, list[int]]) -> list[tuple[int, FrontendBatch]]:
    """Append to the batches, for every request in `readers`, what they hold of it, under each of its reader keys."""
    merged = dict(batches)
    for _, batch in batches:
        for slot, copy in _copies(batch, readers).items():
            have = merged.get(slot)
            merged[slot] = copy if have is None else _joined(have, copy)
    return list(merged.items())


def _copies(batch: FrontendBatch, readers: dict[int, list[int]]) -> dict[int, FrontendBatch]:
    """By reader's slot, the part of a batch that its readers must learn."""
    parts: dict[int, dict[str, list[bytes]]] = {}
    start = 0
    for at in range(len(batch.keys) // 8):
        end = start + 4 * int.from_bytes(batch.counts[4 * at : 4 * at + 4], "little")
        for reader in readers.get(int.from_bytes(batch.keys[8 * at : 8 * at + 8], "little"), ()):
            part = parts.setdefault(reader >> KEY_BITS, {name: [] for name in (*_COLUMNS, "tokens")})
            for name, width in _COLUMNS.items():
                value = reader.to_bytes(8, "little") if name == "keys" else getattr(batch, name)[width * at : width * (at + 1)]
                part[name].append(value)
            part["tokens"].append(batch.tokens[start:end])
        start = end
    slots = {slot: {name: b"".join(values) for name, values in part.items()} for slot, part in parts.items()}
    fields: dict[int, dict[str, tuple[msgspec.Struct, ...]]] = {}
    for name in _told_one_by_one():
        for item in getattr(batch, name):
            for reader in readers.get(item.key, ()):
                of_slot = fields.setdefault(reader >> KEY_BITS, {})
                of_slot[name] = (*of_slot.get(name, ()), msgspec.structs.replace(item, key=reader))
    return {slot: FrontendBatch(batch.step, **slots.get(slot, {}), **fields.get(slot, {})) for slot in slots.keys() | fields.keys()}  # type: ignore[arg-type]


def _told_one_by_one() -> tuple[str, ...]:
    """Fields of a batch that hold structs with a key each, without answers to submits, which concern one front end alone."""
    return tuple(name for name in FrontendBatch.__struct_fields__ if name not in {"step", "accepted", "rejected", "tokens", *_COLUMNS})


def _joined(first: FrontendBatch, second: FrontendBatch) -> FrontendBatch:
    """One batch with the content of both."""
    names = [name for name in FrontendBatch.__struct_fields__ if name != "step"]
    return FrontendBatch(first.step, **{name: getattr(first, name) + getattr(second, name) for name in names})
