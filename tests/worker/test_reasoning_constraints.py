"""Constraints that hold from the end of a reasoning section, on the vocabulary of SmolLM2."""

import json
import re
from functools import cache
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher
from worker.smollm2 import model_file

from pagecast_wire.codec import pack_u32
from pagecast_wire.constraints import constraint_digest, grammar_of, limits
from pagecast_wire.plan import Admission
from pagecast_wire.sampling import Constraint, ConstraintKind, SamplingParams
from pagecast_worker.constraints import ConstraintBook
from pagecast_worker.vocabulary import load_vocabulary

VOCAB, END = 49152, 2
ANSWERS = {
    ConstraintKind.JSON_SCHEMA: ('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}', '{"n": 12}'),
    ConstraintKind.JSON_OBJECT: ("", '{"a": [1, null]}'),
    ConstraintKind.REGEX: ("(yes|no)[.!]/?", "yes./"),
    ConstraintKind.CHOICES: ('["one thing", "</other>"]', "</other>"),
    ConstraintKind.GRAMMAR: ('start: "a" start "b" | "c"', "aacbb"),
}
MARKS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<repo_name>", "<reponame>")]
"""The last are special tokens of the vocabulary, the others are written with the letters of any text."""
THOUGHT = 'Hm: {"n": <b>yes</b> </thin [/THINK or "maybe"?\n'


@cache
def vocabulary():
    return load_vocabulary(model_file(), VOCAB, [END])


@cache
def words() -> list[int]:
    """Tokens that are whole characters: a thought is text like any other."""
    texts = {i: vocabulary().decode_bytes([i]) for i in range(20, VOCAB)}
    return [i for i, text in texts.items() if text.decode(errors="ignore").encode() == text and b"<" not in text]


@pytest.fixture(scope="module")
def book():
    made = ConstraintBook(vocabulary, VOCAB, [END])
    yield made
    made.close()


def cut(text: str) -> list[int]:
    return vocabulary().tokenize_str(text, parse_special=True)


def matcher(constraint: Constraint) -> LLMatcher:
    made = LLMatcher(vocabulary(), grammar_of(constraint, vocabulary()), log_level=0, limits=limits())
    assert not made.is_error(), made.get_error()
    return made


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_any_text_may_stand_before_the_answer_and_nothing_else(opening, closing, kind):
    text, answer = ANSWERS[kind]
    inside, may_open = Constraint(kind, text, "", closing), Constraint(kind, text, opening, closing)
    for constraint, before in ((inside, THOUGHT + closing), (may_open, opening + THOUGHT + closing), (may_open, "")):
        for space in ("", "\n\n", " \r\n\t"):
            made = matcher(constraint)
            assert made.consume_tokens(cut(before + space + answer)) and made.is_accepting(), (before, space)
            assert made.consume_token(END)
    thought = THOUGHT + closing
    for constraint, wrong in ((inside, thought + "\n\nwhat"), (may_open, "what"), (may_open, opening + thought + "what")):
        ids = cut(wrong)
        assert matcher(constraint).try_consume_tokens(ids) < len(ids), wrong


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_no_end_inside(opening, closing):
    made = matcher(Constraint(ConstraintKind.REGEX, "[ab]", opening, closing))
    assert made.consume_tokens(cut(opening + THOUGHT))
    allowed = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
    assert allowed.sum() > 40_000 and not allowed[END] and not made.is_accepting()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_random_texts_by_the_worker_s_book(book, opening, closing, seed):
    """Drawn at random under the masks, admitted again now and then; at some point the thought is brought to its end."""
    random = Random(seed)
    fields = {"result": {"enum": ["one", "another"]}}
    text = json.dumps({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, text, "" if seed else opening, closing)
    ending = cut(closing)
    thought = [*([] if seed else cut(opening)), *(random.choice(words()) for _ in range(9)), *ending]
    output: list[int] = []
    admit(book, constraint, [])
    while output[-1:] != [END]:
        follower = book.rows[0]
        masks = book.masks([follower], np.arange(1), np.zeros(1, np.int32))
        allowed = np.flatnonzero(np.unpackbits(masks.words[0].view(np.uint8), bitorder="little")[:VOCAB])
        if len(output) < len(thought):
            token = thought[len(output)]
            assert token in allowed, len(output)
        else:
            short = [i for i in allowed.tolist() if vocabulary().decode_bytes([i]).strip() or i == END]
            token = random.choice(short or allowed.tolist())
        output.append(token)
        follower.take(token, 0)
        assert not follower.fault and len(output) < 400
        if token != END and random.random() < 0.1:
            admit(book, constraint, output)
    answer = vocabulary().decode_bytes(output[len(thought) : -1]).decode()
    assert json.loads(answer)["result"] in ("one", "another")
    assert re.match(r"\s*{", answer)


def admit(book: ConstraintBook, constraint: Constraint, history: list[int]) -> None:
    sampling = SamplingParams(constraint=constraint)
    book.admit([Admission(0, pack_u32([5, *history]), 1, b"", 0, 1000, 0, pack_u32([END]), sampling)])


def test_marks_are_part_of_a_constraint_s_name():
    made = {constraint_digest(Constraint(ConstraintKind.REGEX, "a", *marks)) for marks in (("", ""), ("", "b"), ("b", "b"), ("b", ""))}
    assert len(made) == 4
