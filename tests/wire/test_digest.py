"""WIRE_DIGEST names the shape of every struct; it may change only together with WIRE_VERSION once a version is released."""

from typing import Any

import msgspec
import pytest

from pagecast_wire import WIRE_DIGEST, WIRE_VERSION
from pagecast_wire.codec import digest_of

RECORDED = {1: "2ab2c3cc17af813f"}
"""Digest of each wire version. A changed struct needs a new number and a new line here."""


def test_digest_equals_the_recorded_one() -> None:
    assert RECORDED[WIRE_VERSION] == WIRE_DIGEST, "a struct changed: raise WIRE_VERSION and record its digest"


def message(name: str = "Message", fields: list[Any] | None = None, tag: str = "message") -> Any:
    return msgspec.defstruct(name, fields or [("first", int), ("second", bytes, b"")], tag=tag, forbid_unknown_fields=True)


@pytest.mark.parametrize(
    "changed",
    [
        message(tag="other"),
        message(name="Other"),
        message(fields=[("first", int), ("third", bytes, b"")]),
        message(fields=[("first", int)]),
        message(fields=[("first", int), ("second", bytes, b""), ("third", int, 0)]),
        message(fields=[("first", str), ("second", bytes, b"")]),
        message(fields=[("first", int), ("second", bytes, b"x")]),
        message(fields=[("first", int), ("second", bytes)]),
        message(fields=[("first", tuple[int, ...]), ("second", bytes, b"")]),
    ],
    ids=["tag", "name", "field renamed", "field gone", "field added", "type", "default", "default gone", "item type"],
)
def test_any_change_of_a_struct_changes_the_digest(changed: Any) -> None:
    assert digest_of([changed]) != digest_of([message()])


def test_a_nested_struct_counts() -> None:
    def outer(inner: Any) -> Any:
        return message(fields=[("items", tuple[inner, ...])])

    assert digest_of([outer(message())]) != digest_of([outer(message(fields=[("first", int)]))])
    assert digest_of([outer(message())]) == digest_of([outer(message())]), "the same shape has the same digest"


def test_enum_values_count() -> None:
    from enum import IntEnum

    first, second = IntEnum("Kind", {"A": 1}), IntEnum("Kind", {"A": 2})
    assert digest_of([message(fields=[("kind", first)])]) != digest_of([message(fields=[("kind", second)])])
