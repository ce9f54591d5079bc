"""What a constraint means, in one place for all who compile one: front ends, to refuse a bad one by name, and workers, to follow it.

llguidance is loaded by those who call this, never by the scheduler.
"""

import hashlib
import json
import re
from typing import Any, Final

from pagecast_wire.sampling import Constraint, ConstraintKind

_WHITESPACE: Final = r"[ \n\r\t]{0,32}"
"""Between the parts of a JSON text: enough for an indented one, too little for a model to stay in for ever."""


_SPACE_BEHIND_REASONING: Final = r"[ \n\r\t]{0,16}"


def constraint_digest(constraint: Constraint) -> bytes:
    """32 bytes that name a constraint between scheduler and worker."""
    named = json.dumps([int(constraint.kind), constraint.text, constraint.opening, constraint.closing])
    return hashlib.sha256(named.encode()).digest()


def grammar_of(constraint: Constraint, vocabulary: Any = None) -> str:
    """llguidance's grammar for a constraint. vocabulary: an LLTokenizer that knows special tokens; without one, the marks of a reasoning
    section are taken for plain text. Raises ValueError where the text is not of its kind; whether the grammar compiles is not known yet."""
    grammar = _answer_grammar(constraint.kind, constraint.text)
    return grammar if not constraint.closing else _behind_reasoning(grammar, constraint.opening, constraint.closing, vocabulary)


def _answer_grammar(kind: ConstraintKind, text: str) -> str:
    from llguidance import LLMatcher

    match kind:
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


def _behind_reasoning(grammar: str, opening: str, closing: str, vocabulary: Any) -> str:
    """The grammar of an answer, named and called from one that lets a reasoning section stand before it."""
    if grammar.lstrip().startswith("{"):
        parts = json.loads(grammar)["grammars"]
        if len(parts) != 1:
            raise ValueError("a grammar that is to follow reasoning must be one grammar")
        answer = {**parts[0], "name": "answer"}
    else:
        answer = {"name": "answer", "lark_grammar": grammar}
    begin, end = _special(opening, vocabulary), _special(closing, vocabulary)
    inside = f"inside: /(?s:.*)/ {end}" if end else f"inside[lazy]: /(?s:.*){_escaped(closing)}/"
    whole = f"({begin or json.dumps(opening)} inside)?" if opening else "inside"
    main = f"start: {whole} space @answer\n{inside}\nspace: /{_SPACE_BEHIND_REASONING}/\n"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, answer]})


def _special(mark: str, vocabulary: Any) -> str:
    """A mark as Lark names a special token; "" if it is none, and so is written with the letters of any text."""
    ids = vocabulary.tokenize_str(mark, parse_special=True) if mark and vocabulary is not None else []
    return f"<[{ids[0]}]>" if len(ids) == 1 and vocabulary.is_special_token(ids[0]) else ""


def _escaped(mark: str) -> str:
    """A mark inside a regular expression between slashes."""
    return re.sub(r"([^0-9A-Za-z_<>])", r"\\\1", mark)


def limits() -> Any:
    """What a constraint may cost, as LLParserLimits: compiling stays well below a second, a mask below a few milliseconds. Front end and
    worker use the same, so that what one accepts the other does not find too large to compile."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000, initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=25_000, max_lexer_states=50_000,
        max_grammar_size=250_000, verbose_errors=False,
    )  # fmt: skip


def _json_grammar(matcher: Any, schema: str) -> str:
    if schema.strip() in ("true", "false"):  # schemas too, to which llguidance can add no options
        schema = f'{{"anyOf": [{schema}]}}'
    return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices must be a JSON array of non-empty strings")
    return choices
