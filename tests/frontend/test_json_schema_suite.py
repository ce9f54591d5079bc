"""The JSON Schema project's own test suite (draft 4, from its package): a schema is followed exactly, or refused by name.

A constraint may be stricter than its schema (the order of an object's keys is fixed, for one); it must never be looser.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagecast_scheduler.frontend.constraint_child import fault
from pagecast_scheduler.frontend.errors import Refusal
from pagecast_scheduler.frontend.json_schema_rules import check_schema
from pagecast_wire.constraints import grammar_of
from pagecast_wire.sampling import Constraint, ConstraintKind

SUITE = Path(__file__).resolve().parents[2] / "protos/node_modules/json-schema-test-suite/tests/draft4"
TOKENIZER = LLTokenizer("byte")
STRICTER = 0.03
"""Share of values that a constraint may refuse although the schema takes them."""


def accepts(grammar: str, text: str) -> bool:
    """Whether a text may come out under the constraint, as a whole."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def refusal(schema: str) -> str:
    """Why a schema is refused, "" if it is not: by our own look at it, or by the compiler."""
    try:
        check_schema(schema, "schema", 64)
    except Refusal as refused:
        return refused.violations[0].description
    return fault("json_schema", schema, TOKENIZER)


def verdicts(group: dict[str, Any]) -> Counter[str]:
    """How the values of one schema fare."""
    schema = json.dumps(group["schema"])
    if refusal(schema):
        return Counter(refused=len(group["tests"]))
    grammar, found = grammar_of(Constraint(ConstraintKind.JSON_SCHEMA, schema)), Counter[str]()
    for test in group["tests"]:
        got = accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
        found["right" if got == test["valid"] else "looser" if got else "stricter"] += 1
    return found


def test_schemas_of_the_public_suite_are_followed_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted([*SUITE.glob("*.json"), *SUITE.glob("optional/*.json")])
    if not files:
        pytest.skip("the suite's package is not installed: npm ci in protos/")
    share = {path.stem: sum((verdicts(group) for group in json.loads(path.read_text())), Counter[str]()) for path in files}
    total = sum(share.values(), Counter[str]())
    whole = [name for name, count in share.items() if not count["refused"]]
    with capsys.disabled():
        print(f"\nJSON Schema suite: {len(whole)} of {len(share)} keywords enforced, of {total.total()} values {dict(total)}")
        print("refused, all or in part: " + ", ".join(sorted(set(share) - set(whole))))
    assert total["looser"] == 0, share
    assert total["stricter"] <= STRICTER * total.total() and total["right"] > 200 and len(whole) >= 22


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ('{"type": "array", "uniqueItems": true}', 'keyword "uniqueItems" at the top'),
        ('{"properties": {"a": {"anyOf": [{}, {"not": {}}]}}}', 'keyword "not" at /properties/a/anyOf/1'),
        ('{"oneOf": [{"minimum": 1}, {"maximum": 5}]}', "oneOf"),
        ('{"type": "string", "format": "nonsense"}', "nonsense"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: str, word: str) -> None:
    assert word in refusal(schema)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    assert refusal('{"properties": {"not": {"type": "integer"}, "if": {}}, "enum": [{"not": 1}]}') == ""
