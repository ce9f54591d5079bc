"""What a constraint means, in one place for all who compile one: front ends, to refuse a bad one by name, and workers, to follow it.

llguidance is loaded by those who call this, never by the scheduler.
"""

import hashlib
import json
from typing import Any, Final

from pagecast_wire.sampling import Constraint, ConstraintKind

_WHITESPACE: Final = r"[ \n\r\t]{0,32}"
"""Between the parts of a JSON text: enough for an indented one, too little for a model to stay in for ever."""


def constraint_digest(constraint: Constraint) -> bytes:
    """32 bytes that name a constraint between scheduler and worker."""
    return hashlib.sha256(f"{int(constraint.kind)}\n{constraint.text}".encode("utf-8", "surrogatepass")).digest()


def grammar_of(constraint: Constraint) -> str:
    """llguidance's grammar for a constraint. Raises ValueError where the text is not of its kind; whether the grammar compiles is not known
    yet."""
    from llguidance import LLMatcher

    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(LLMatcher, text)
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar(LLMatcher, '{"type": "object"}')
        case ConstraintKind.REGEX:
            return str(LLMatcher.grammar_from_regex(text))
        case ConstraintKind.CHOICES:
            return "start: " + " | ".join(json.dumps(choice) for choice in _choices(text))
        case ConstraintKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(text))


def limits() -> Any:
    """What a constraint may cost, as LLParserLimits: compiling stays well below a second, a mask below a few milliseconds. Front end and
    worker use the same, so that what one accepts the other does not find too large to compile."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000, initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=25_000, max_lexer_states=50_000,
        max_grammar_size=250_000, verbose_errors=False,
    )  # fmt: skip


def _json_grammar(matcher: Any, schema: str) -> str:
    return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices must be a JSON array of non-empty strings")
    return choices
