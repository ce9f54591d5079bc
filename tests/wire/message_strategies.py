"""Hypothesis strategies for every wire message, derived from the structs themselves so that a new field is covered at once."""

from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from pagecast_wire import control, plan, result

UNIONS: dict[str, Any] = {
    "from_frontend": control.FromFrontend,
    "to_frontend": control.ToFrontend,
    "to_worker": plan.ToWorker,
    "from_worker": result.FromWorker,
}


def messages(direction: str) -> tuple[type[msgspec.Struct], ...]:
    """The message classes of one direction."""
    return UNIONS[direction].__args__


EVERY_MESSAGE = [(direction, cls) for direction in UNIONS for cls in messages(direction)]


@cache
def instances(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances of one struct with arbitrary legal field values."""
    return _of(msgspec.inspect.type_info(cls))


def _of(info: Any) -> st.SearchStrategy[Any]:
    inspect = msgspec.inspect
    if isinstance(info, inspect.StructType):
        fields = {f.name: _of(f.type) if f.required else st.one_of(st.just(f.default), _of(f.type)) for f in info.fields}
        return st.fixed_dictionaries(fields).map(lambda values, cls=info.cls: cls(**values))
    if isinstance(info, inspect.VarTupleType):
        return st.lists(_of(info.item_type), max_size=3).map(tuple)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*(_of(item) for item in info.item_types))
    if isinstance(info, inspect.UnionType):
        return st.one_of(*(_of(option) for option in info.types))
    if isinstance(info, inspect.EnumType):
        return st.sampled_from(list(info.cls))
    plain: dict[type, st.SearchStrategy[Any]] = {
        inspect.NoneType: st.none(),
        inspect.IntType: st.integers(-(1 << 63), (1 << 64) - 1),
        inspect.FloatType: st.floats(allow_nan=False),
        inspect.BoolType: st.booleans(),
        inspect.StrType: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        inspect.BytesType: st.binary(max_size=24),
    }
    return plain[type(info)]
