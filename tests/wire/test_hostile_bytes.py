"""Whatever bytes arrive, decode gives a message or raises WireError: nothing else, and nothing of the payload in its text."""

import struct

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire.message_strategies import EVERY_MESSAGE, UNIONS, instances

from pagecast_wire import WireError, codec, decode, encode
from pagecast_wire.intake import Abort, FrontendBatch, Rejected, RejectReason, Submit
from pagecast_wire.plan import StepPlan
from pagecast_wire.sampling import SamplingParams, StopRules

DIRECTIONS = sorted(UNIONS)


def decode_or_refuse(data: bytes, direction: str) -> object:
    """The message, or None where it was refused in the proper way."""
    try:
        return decode(data, direction)
    except WireError:
        return None


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(DIRECTIONS))
@example(b"", "to_worker")
@example(b"\xc1", "to_worker")
@example(b"\x91" * 5000, "from_worker")
@example(b"\x81\xa4type" * 2000, "from_frontend")
def test_random_bytes(data: bytes, direction: str) -> None:
    assert decode_or_refuse(data, direction) is None


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(EVERY_MESSAGE))
def test_truncated_messages(data: st.DataObject, chosen: tuple[str, type[msgspec.Struct]]) -> None:
    direction, cls = chosen
    whole = encode(data.draw(instances(cls)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert decode_or_refuse(whole[:cut], direction) is None


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(EVERY_MESSAGE))
def test_flipped_bytes(data: st.DataObject, chosen: tuple[str, type[msgspec.Struct]]) -> None:
    """A flipped byte may still be a legal message; it may never be another exception."""
    direction, cls = chosen
    whole = bytearray(encode(data.draw(instances(cls))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(whole), direction)


PICKLES = [
    b"cbuiltins\nexit\n(I3\ntR.",
    b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00"
    b"\x8c\x08builtins\x94\x8c\x04exit\x94\x93\x94K\x03\x85\x94R\x94.",
]
"""`exit(3)` as pickles of protocol 0 and 4, written out by hand: whoever loads one ends the test run."""


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pickled", PICKLES)
def test_pickles_are_refused_unread(direction: str, pickled: bytes) -> None:
    with pytest.raises(WireError):
        decode(pickled, direction)


@pytest.mark.parametrize("count", [10, 10**6, 2**32 - 1])
def test_claimed_sizes_allocate_nothing(count: int) -> None:
    """Headers that promise four billion items must not make room for them."""
    claim = struct.pack(">I", count)
    for lie in (b"\xdd" + claim, b"\xdf" + claim, b"\xc6" + claim, b"\xdb" + claim):
        assert decode_or_refuse(lie, "from_frontend") is None
        assert decode_or_refuse(b"\x82\xa4type\xa5abort\xa4keys" + lie, "from_frontend") is None


@pytest.mark.parametrize(("direction", "cls"), EVERY_MESSAGE, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_unknown_field_and_unknown_tag_are_refused(direction: str, cls: type[msgspec.Struct], data: st.DataObject) -> None:
    plain = msgspec.msgpack.decode(encode(data.draw(instances(cls))))
    for spoiled in ({**plain, "surprise": 1}, {**plain, "type": "nobody"}, {k: v for k, v in plain.items() if k != "type"}):
        with pytest.raises(WireError):
            decode(msgspec.msgpack.encode(spoiled), direction)


def test_unknown_field_deep_inside_is_refused() -> None:
    submit = Submit(key=1, prompt=b"", sampling=SamplingParams(), stop=StopRules(max_output_tokens=1), cache_namespace=b"")
    plain = msgspec.msgpack.decode(encode(submit))
    plain["sampling"]["surprise"] = 1
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(plain), "from_frontend")


def test_number_outside_a_closed_set_is_refused() -> None:
    batch = FrontendBatch(step=1, rejected=(Rejected(key=1, reason=RejectReason.INVALID),))
    plain = msgspec.msgpack.decode(encode(batch))
    plain["rejected"][0]["reason"] = 99
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(plain), "to_frontend")


@pytest.mark.parametrize(("direction", "cls"), EVERY_MESSAGE, ids=lambda value: getattr(value, "__name__", value))
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_message_of_another_direction_is_refused(direction: str, cls: type[msgspec.Struct], data: st.DataObject) -> None:
    encoded = encode(data.draw(instances(cls)))
    for other, union in UNIONS.items():
        if cls not in union.__args__:
            with pytest.raises(WireError):
                decode(encoded, other)


def test_size_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode(Abort(keys=tuple(range(100))))
    monkeypatch.setitem(codec.MAX_BYTES, "from_frontend", len(encoded))
    assert isinstance(decode(encoded, "from_frontend"), Abort)
    monkeypatch.setitem(codec.MAX_BYTES, "from_frontend", len(encoded) - 1)
    with pytest.raises(WireError, match=f"{len(encoded)} bytes exceeds the cap of {len(encoded) - 1}"):
        decode(encoded, "from_frontend")


def test_every_direction_has_a_cap() -> None:
    assert set(codec.MAX_BYTES) == set(UNIONS)


def test_trailing_bytes_are_refused() -> None:
    encoded = encode(StepPlan(epoch=1, step=1))
    for tail in (b"\x00", encoded):
        with pytest.raises(WireError):
            decode(encoded + tail, "to_worker")


def test_bytes_of_a_wrong_text_are_refused() -> None:
    with pytest.raises(WireError):
        decode(b"\x81\xa4type\xa5ab\xff\xfet", "from_frontend")


def test_error_text_holds_no_payload() -> None:
    plain = {"type": "abort", "keys": [], "the-secret-field": "the-secret-value"}
    with pytest.raises(WireError) as caught:
        decode(msgspec.msgpack.encode(plain), "from_frontend")
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__, "the cause would carry the payload into a log"
