"""Every message survives its own encoding, and its columns come back as the numbers that went in."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.message_strategies import EVERY_MESSAGE, UNIONS, instances

from pagecast_wire import WireError, decode, encode, pack_u32, pack_u64, view_u32, view_u64
from pagecast_wire.sampling import SamplingParams, StopRules


@pytest.mark.parametrize(("direction", "cls"), EVERY_MESSAGE, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decode_gives_back_what_was_encoded(direction: str, cls: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    again = decode(encode(message), direction)
    assert type(again) is cls
    assert again == message
    assert encode(again) == encode(message), "one message has one encoding"


def test_memoryview_is_as_good_as_bytes() -> None:
    """The sockets hand over views of their frames without copying them."""
    from pagecast_wire.intake import StopAt

    message = StopAt(key=5, sequence=1, keep=7)
    assert decode(memoryview(encode(message)), "from_frontend") == message


def test_tags_are_unique_per_direction() -> None:
    for direction, union in UNIONS.items():
        tags = [cls.__struct_config__.tag for cls in union.__args__]
        assert len(set(tags)) == len(tags), direction
        assert all(isinstance(tag, str) for tag in tags), f"{direction}: a message without a tag cannot be told apart"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64))
def test_u32_columns(values: list[int]) -> None:
    column = pack_u32(values)
    assert len(column) == 4 * len(values)
    assert view_u32(column).tolist() == values
    assert column == b"".join(v.to_bytes(4, "little") for v in values), "little-endian on every machine"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=64))
def test_u64_columns(values: list[int]) -> None:
    column = pack_u64(np.array(values, dtype=np.uint64))
    assert view_u64(column).tolist() == values
    assert column == b"".join(v.to_bytes(8, "little") for v in values)


@pytest.mark.parametrize("source", [range(5), [0, 1, 2, 3, 4], np.arange(10, dtype=np.int64)[::2] // 2, np.arange(5, dtype=np.int32)])
def test_columns_from_any_source(source: Any) -> None:
    assert view_u32(pack_u32(source)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("view", "size"), [(view_u32, 5), (view_u32, 3), (view_u64, 12), (view_u64, 1)])
def test_torn_column_is_refused(view: Any, size: int) -> None:
    with pytest.raises(WireError, match="not a multiple"):
        view(bytes(size))


def test_views_cannot_be_written() -> None:
    """A view shares memory with the message: writing into it would change what others read."""
    with pytest.raises(ValueError, match="read-only"):
        view_u32(pack_u32([1, 2]))[0] = 9


def test_defaults_are_left_out_where_size_matters() -> None:
    """A decode-only plan is the commonest message of all; its empty columns may cost nothing."""
    from pagecast_wire.plan import StepPlan

    assert len(encode(StepPlan(epoch=1, step=1000))) < 40


def test_defaults_of_the_sender_reach_the_receiver() -> None:
    from pagecast_wire.intake import Priority, Submit

    bare = Submit(key=1, prompt=pack_u32([3]), sampling=SamplingParams(), stop=StopRules(max_output_tokens=4), cache_namespace=bytes(32))
    again = decode(encode(bare), "from_frontend")
    assert (again.num_sequences, again.priority, again.deadline_ms, again.history) == (1, Priority.NORMAL, -1, ())
