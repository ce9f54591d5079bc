"""The conformance suite can fail: every law of a stream, broken once, is noticed; the reference finds what brute force must."""

import json
from collections import Counter
from typing import Any

import pytest

from pagecast.conformance import cases, contract_checks, runner, structured_checks
from pagecast.conformance.checks import check_shape, compare, expect
from pagecast.conformance.endpoint import Answer, Broken, Output, joined
from pagecast.conformance.random_schemas import schema_of
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import model_pb2

EFFECTIVE = pb.EffectiveParameters(num_sequences=1, max_output_tokens=8)
LIMITS = model_pb2.ModelLimits(max_model_len=50, max_stop_texts=16, max_message_bytes=99)
MODEL = model_pb2.Model(vocab_size=100, end_token_ids=[2], limits=LIMITS)


def tokens(offset: int, *ids: int, index: int = 0, text: str = "") -> dict[str, Any]:
    return {"tokens": pb.TokensEvent(sequence_index=index, first_token_offset=offset, token_ids=ids, text=text)}


def accepted(**fields: Any) -> dict[str, Any]:
    return {"accepted": pb.AcceptedEvent(effective=pb.EffectiveParameters(**{"num_sequences": 1, "max_output_tokens": 8, **fields}))}


END = {"sequence_finished": pb.SequenceFinishedEvent(reason=pb.FINISH_REASON_LENGTH)}
DONE: dict[str, Any] = {"completed": pb.CompletedEvent()}


def numbered(*events: dict[str, Any]) -> list[pb.StreamEvent]:
    return [pb.StreamEvent(seq=n, **event) for n, event in enumerate(events, 1)]


def test_a_lawful_stream_is_joined() -> None:
    answer = joined(numbered(accepted(), tokens(0, 5, text="a"), tokens(1, 6, 7, text="bc"), END, DONE))
    assert (answer.outputs[0].ids, answer.outputs[0].text, answer.outputs[0].reason) == ([5, 6, 7], "abc", pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(
    ("events", "word"),
    [
        (numbered(tokens(0, 5), END, DONE), "accepted"),
        (numbered(accepted(), tokens(0, 5), END), "completed"),
        (numbered(accepted(), accepted(), END, DONE), "accepted"),
        (numbered(accepted(), tokens(0, 5), tokens(2, 6), END, DONE), "offset"),
        (numbered(accepted(), tokens(0, 5), tokens(0, 5), END, DONE), "offset"),
        (numbered(accepted(), END, tokens(0, 5), DONE), "after the end"),
        (numbered(accepted(), END, END, DONE), "twice"),
        (numbered(accepted(num_sequences=2), END, DONE), "did not end"),
        (numbered(accepted(logprobs_top_n=0), tokens(0, 5), END, DONE), "beside"),
        (numbered(accepted(), tokens(0, 5), {"prompt": pb.PromptEvent()}, END, DONE), "after tokens"),
        (numbered(accepted(), {"prompt": pb.PromptEvent(first_position=1)}, END, DONE), "gap"),
        (numbered(accepted(), tokens(0, 5), END, DONE)[:2] + numbered(END, DONE), "seq"),
    ],
)
def test_every_law_of_a_stream_is_held(events: list[pb.StreamEvent], word: str) -> None:
    with pytest.raises(Broken, match=word):
        joined(events)


def record(token_id: int, logprob: float, *top: tuple[int, float]) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token_id, logprob=logprob, top=[pb.AlternativeToken(token_id=i, logprob=v) for i, v in top])


def answer(ids: list[int], records: list[pb.TokenLogprob] | None = None, count: int | None = None, **fields: Any) -> Answer:
    made = [record(i, -1.0) for i in ids] if records is None else records
    usage = pb.Usage(output_tokens=len(ids) if count is None else count)
    return Answer(EFFECTIVE, [Output(ids=ids, logprobs=made, usage=usage, **fields)], usage, [])


WITH_TWO = pb.GenerationSpec(output=pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=2)))


@pytest.mark.parametrize(
    ("made", "spec", "word"),
    [
        (answer([]), pb.GenerationSpec(), "tokens"),
        (answer([1] * 9), pb.GenerationSpec(), "1 to 8"),
        (answer([1, 2], count=3), pb.GenerationSpec(), "usage"),
        (answer([1, 2], [record(1, -1.0)]), pb.GenerationSpec(), "one log-probability"),
        (answer([1], [record(1, 0.5)]), pb.GenerationSpec(), "log-probability"),
        (answer([1], [record(1, -1.0, (1, -1.0))]), WITH_TWO, "likeliest"),
        (answer([1], [record(1, -3.0, (2, -3.0), (3, -1.0))]), WITH_TWO, "order"),
        (answer([1], [record(1, -0.1, (2, -0.1), (3, -0.2))]), WITH_TWO, "more than 1"),
        (answer([1], [record(1, -0.5, (2, -1.0), (3, -2.0))]), WITH_TWO, "likelier"),
        (answer([1], [record(1, -1.5, (1, -1.0), (3, -2.0))]), WITH_TWO, "two log-prob"),
    ],
)
def test_every_law_of_an_answer_is_held(made: Answer, spec: pb.GenerationSpec, word: str) -> None:
    with pytest.raises(Broken, match=word):
        check_shape(spec, made)


def test_equal_logits_must_give_equal_tokens_and_others_may_not() -> None:
    one, other = answer([1], [record(1, -1.0, (1, -1.0))]), answer([2], [record(2, -1.0, (1, -1.0))])
    with pytest.raises(Broken, match="equal log-probabilities"):
        compare(one, other)
    assert "differ by 1.0e-01" in compare(one, answer([2], [record(2, -0.9, (2, -0.9))]))
    with pytest.raises(Broken, match="text"):
        compare(answer([1], text="a"), answer([1], text="b"))
    with pytest.raises(Broken, match="tokens is 1"):
        expect(one, {"tokens": 2})


def test_the_brute_force_reference_of_stop_texts() -> None:
    pieces = [b"ab", "ü".encode()[:1], "ü".encode()[1:] + b"c", b"abc"]
    assert contract_checks.expected(pieces, ["bü"], 0) == ("a", "bü", 3)
    assert contract_checks.expected(pieces, ["ab"], 2) == ("abüc", "ab", 4)
    assert contract_checks.expected(pieces, ["cab", "ca"], 0) == ("abü", "ca", 4)
    assert contract_checks.expected(pieces, ["x"], 0) == ("abücabc", None, 4)
    assert contract_checks.expected([b"a", b"\xf0\x9f"], ["\ufffd"], 0) == ("a", "\ufffd", 2)


def test_the_reference_of_penalties_tells_right_from_wrong() -> None:
    options = pb.SamplingOptions(presence_penalty=1, frequency_penalty=0.5, logit_bias=[pb.TokenBias(token_id=3, bias=-9)])
    counts = Counter({1: 2})
    best = [(1, -0.1), (3, -0.2), (2, -2.0)]
    right, wrong = record(2, -2.0, *best), record(1, -0.1, *best)
    assert contract_checks._best_is_chosen(right, 0.0, counts, set(), options)
    assert not contract_checks._best_is_chosen(wrong, 0.0, counts, set(), options)


def test_the_validator_of_structured_output_refuses() -> None:
    done = {"reason": pb.FINISH_REASON_CONSTRAINT_COMPLETE}
    assert structured_checks.check_json(Output(text="3", **done), '{"type": "integer"}')
    assert not structured_checks.check_json(Output(text="3", reason=pb.FINISH_REASON_LENGTH), '{"type": "string"}')
    for output in (Output(text='"x"', **done), Output(text="{", **done), Output(text="3", reason=pb.FINISH_REASON_STOP)):
        with pytest.raises(Broken):
            structured_checks.check_json(output, '{"type": "integer"}')


def test_random_schemas_are_many_valid_and_always_the_same() -> None:
    made = [json.dumps(schema_of(seed)) for seed in range(200)]
    assert len(set(made)) > 150 and made == [json.dumps(schema_of(seed)) for seed in range(200)]
    for text in made:
        structured_checks.validator(text).check_schema(json.loads(text))


def test_the_data_files_are_written_out_for_the_endpoint() -> None:
    known = list(cases.load(MODEL))
    assert {case.check for case in known} == set(runner.CHECKS)
    assert len({(case.group, case.name) for case in known}) == len(known) > 200
    assert cases.expand({"$limit": "max_stop_texts", "times": 2, "plus": 1}, MODEL) == 33
    assert cases.expand([{"$text": "ab", "times": {"$limit": "vocab_size"}}, {"$end": 0}], MODEL) == ["ab" * 100, 2]
    assert json.loads(cases.expand({"$nested": {"a": 0}, "depth": 3}, MODEL)) == {"a": {"a": {"a": {}}}}
