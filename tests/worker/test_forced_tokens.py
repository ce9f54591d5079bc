"""Forced tokens through scheduler core and torch executor: jumped over or drawn one by one, they are the same."""

import json
from functools import cache, partial
from random import Random

import numpy as np
import pytest
import torch
from worker.graphs_here import MixedHere, ReplayedHere
from worker.plan_driver import Later
from worker.random_schemas import schema_text
from worker.smollm2 import model_file
from worker.tiny_model import wide_executor

from pagecast_scheduler.core import invariants, policy
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import pack_u32, view_u32, view_u64
from pagecast_wire.constraints import constraint_digest, grammar_of, limits
from pagecast_wire.intake import Accepted, Finished, Submit
from pagecast_wire.plan import Admission
from pagecast_wire.sampling import Constraint, ConstraintFault, ConstraintKind, FinishReason, SamplingParams, StopRules
from pagecast_worker.constraints import MOST_AHEAD, ConstraintBook
from pagecast_worker.mixed_graphs import Size
from pagecast_worker.steps import decode_step, padded_step
from pagecast_worker.vocabulary import load_vocabulary

VOCAB, END, PROMPT = 49152, 2, [100, 200, 300]
PERSON = {
    "type": "object", "additionalProperties": False, "required": ["first_name", "date_of_birth", "kind"],
    "properties": {
        "first_name": {"type": "string", "maxLength": 6}, "date_of_birth": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
        "kind": {"const": "a record that was made up for a test of forced tokens"},
    },
}  # fmt: skip
FORM = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON))
SENTENCE = Constraint(ConstraintKind.REGEX, "The answer to this question is (yes|no), as everybody who has read the book knows\\.")
TEXTS = Constraint(ConstraintKind.CHOICES, json.dumps(["good morning to all of you", "good evening to everybody else", "no"]))


@cache
def vocabulary():
    return load_vocabulary(model_file(), VOCAB, [END])


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    with wide_executor(tmp_path_factory.mktemp("wide"), VOCAB, END) as made:
        yield made


@pytest.fixture(scope="module")
def book():
    made = ConstraintBook(vocabulary, VOCAB, [END])
    yield made
    made.close()


class Run:
    """Requests through core and executor, with plans ahead of results. lose_after: plans after which the worker group is lost."""

    def __init__(self, executor, submits: list[Submit], lose_after: int = 0, **sizes) -> None:
        self.executor, self.lose_after = executor, lose_after
        values = {"num_blocks": 150, "max_num_seqs": 8, "max_num_batched_tokens": 256} | sizes
        self.core = Scheduler(
            SchedulerConfig(
                block_size=16, max_model_len=256, max_queued_requests=100, max_queued_tokens=100_000, table_checksums=True, **values
            ),
            epoch=1,
        )
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.logprobs: dict[tuple[int, int], list[float]] = {}
        for submit in submits:
            assert isinstance(self.core.submit(submit, 0), Accepted)
            for sequence in range(submit.num_sequences):
                self.tokens[submit.key, sequence], self.logprobs[submit.key, sequence] = [], []
        self.num_plans = 0
        self._go()

    @property
    def num_forced(self) -> int:
        return self.core.state.totals.forced_tokens

    def _open(self) -> None:
        self.executor.start_epoch(self.core.start_epoch())
        for constraint in self.core.take_constraints():
            self.core.constraint_prepared(constraint_digest(constraint), ConstraintFault.NONE, 1)

    def _go(self) -> None:
        self._open()
        while len(self.finished) < len(self.tokens):
            self.num_plans += 1
            assert self.num_plans < 2000
            while (plan := self.core.plan_step(self.num_plans)) is not None:
                self.executor.submit(plan)
            result = self.executor.collect(wait=True)
            if self.num_plans == self.lose_after:
                self.core.fail_epoch(self.num_plans)
                self._open()
            else:
                self.core.apply_result(result, self.num_plans)
            invariants.check(self.core)
            self._take_batches()

    def _take_batches(self) -> None:
        for _, batch in self.core.take_batches():
            tokens = iter(view_u32(batch.tokens).tolist())
            columns = view_u64(batch.keys).tolist(), *(view_u32(c).tolist() for c in (batch.sequences, batch.offsets, batch.counts))
            for key, sequence, offset, count in zip(*columns, strict=True):
                assert offset == len(self.tokens[key, sequence])
                self.tokens[key, sequence] += [next(tokens) for _ in range(count)]
            for told in batch.logprobs:
                assert told.offset == len(self.logprobs[told.key, told.sequence])
                self.logprobs[told.key, told.sequence].append(told.logprob)
            for end in batch.finished:
                self.finished[end.key, end.sequence] = end


def submit(
    key: int, constraint: Constraint, output: int = 120, stops: tuple[int, ...] = (), least: int = 0, n: int = 1, **values
) -> Submit:
    sampling = SamplingParams(seed=key, constraint=constraint, **{"temperature": 0.8} | values)
    stop = StopRules(output, least, pack_u32([END, *stops]))
    return Submit(key=key, prompt=pack_u32(PROMPT), sampling=sampling, stop=stop, cache_namespace=bytes(32), num_sequences=n)


def requests() -> list[Submit]:
    (good,) = set(vocabulary().tokenize_str(" everybody"))
    return [
        submit(1, FORM), submit(2, FORM, temperature=0.0), submit(3, SENTENCE, n=3),
        submit(4, TEXTS, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
        submit(5, FORM, presence_penalty=1.5, repetition_penalty=1.2), submit(6, SENTENCE, output=9), submit(7, SENTENCE, least=40),
        submit(8, SENTENCE, stops=(good,)), submit(9, FORM, num_logprobs=2), submit(10, FORM, output=31, num_prompt_logprobs=1),
        submit(11, TEXTS, logit_bias_ids=pack_u32([END]), logit_bias_values=np.full(1, 9, "<f4").tobytes()),
    ]  # fmt: skip


@cache
def drawn(executor) -> Run:
    """Every token drawn by a decode step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "FEWEST_JUMPED", 1 << 30)
        run = Run(executor, requests())
    assert run.num_forced == 0
    return run


def same(run: Run, other: Run) -> None:
    assert run.tokens == other.tokens
    ends = lambda made: {name: (end.reason, end.stop_token_id, end.usage.output_tokens) for name, end in made.finished.items()}
    assert ends(run) == ends(other)
    for name, values in run.logprobs.items():
        assert values == pytest.approx(other.logprobs[name], abs=1e-4)


def test_jumped_tokens_are_the_ones_that_would_be_drawn(executor):
    run, slow = Run(executor, requests()), drawn(executor)
    same(run, slow)
    assert run.num_forced > 80 and run.num_plans < slow.num_plans
    assert len(run.logprobs[9, 0]) == len(run.tokens[9, 0])
    whole = [text for (key, _), text in ((name, vocabulary().decode_bytes(t[:-1])) for name, t in run.tokens.items()) if key in (3, 7)]
    assert len(whole) == 4 and all(text.startswith(b"The answer to this question is ") for text in whole)
    assert run.finished[8, 0].reason == FinishReason.STOP and run.finished[6, 0].reason == FinishReason.LENGTH


@pytest.mark.parametrize("sizes", [{"num_blocks": 12}, {"max_num_batched_tokens": 12}, {"max_plans_in_flight": 1}, {"max_num_seqs": 2}])
def test_whatever_the_room_the_tokens_are_the_same(executor, sizes):
    """Preemption in the middle of forced runs, jumps cut by the budget, no plan ahead, few rows."""
    run = Run(executor, requests(), **sizes)
    same(run, drawn(executor))
    assert run.num_forced
    if "num_blocks" in sizes:
        assert run.core.stats().num_preemptions


def test_masks_that_wait_for_the_tokens_before_them(executor, monkeypatch):
    """A device that takes its time: a plan's rows are drawn when the tokens of the one before have come down."""
    staging = executor.backend.staging
    download = staging.download
    monkeypatch.setattr(staging, "download", lambda: Later(download()))
    run = Run(executor, requests())
    same(run, drawn(executor))
    assert run.num_forced > 80


def test_steps_of_graphs(executor, monkeypatch):
    padding, device = executor.state.padding, torch.device("cpu")
    mixed = MixedHere(partial(padded_step, executor), [Size(24, 8, 4, 8), Size(64, 8, 8, 8)], padding)
    monkeypatch.setattr(executor, "_mixed_graphs", mixed)
    monkeypatch.setattr(executor, "_graphs", ReplayedHere(partial(decode_step, executor), [1, 2, 4, 8], padding, device))
    run = Run(executor, requests())
    same(run, drawn(executor))
    assert run.num_forced > 80 and len(set(mixed.used)) == 2


@pytest.mark.parametrize("lose_after", [3, 11])
def test_a_lost_worker_group_changes_nothing(executor, lose_after):
    run = Run(executor, requests(), lose_after=lose_after)
    assert run.tokens == drawn(executor).tokens and run.core.stats().num_recoveries == 1 and run.num_forced


def test_rows_whose_rules_may_forbid_a_token_do_not_jump(executor):
    """Bad words and allowed ids: a forced token that they forbid leaves none, which only drawing it can show."""
    first = vocabulary().tokenize_str("The answer to this")
    bad = {"bad_word_tokens": pack_u32(first[-1:]), "bad_word_lengths": pack_u32([1])}
    run = Run(executor, [submit(1, SENTENCE, **bad), submit(2, SENTENCE, allowed_token_ids=pack_u32(first))])
    assert not run.num_forced
    assert [run.finished[key, 0].reason for key in (1, 2)] == [FinishReason.CONSTRAINT_FAILED] * 2
    assert run.tokens[1, 0] == first[:-1] and run.tokens[2, 0] == first


def test_what_is_ahead_is_what_llguidance_allows(book):
    """At every place of random texts: where a follower is ahead, llguidance's own mask has that token alone, and it says nothing else
    is forced elsewhere. Also for a follower made again from the history."""
    from llguidance import LLMatcher

    constraints = [FORM, SENTENCE, TEXTS, *(Constraint(ConstraintKind.JSON_SCHEMA, schema_text(seed)) for seed in range(400, 424))]
    random, num_ahead = Random(3), 0
    eager = np.array([i for i in range(VOCAB) if vocabulary().decode_bytes([i])[-1:] in (b'"', b"}", b"]")])
    for number, constraint in enumerate(constraints):
        plain = LLMatcher(vocabulary(), grammar_of(constraint), log_level=0, limits=limits())
        history: list[int] = []
        book.admit([_admission(constraint, history)])
        for _ in range(120):
            follower = book.rows[0]
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(plain.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB])
            if follower.ahead:
                num_ahead += 1
                assert allowed.tolist() == follower.ahead[:1], (number, history)
            else:
                assert not plain.compute_ff_tokens(), (number, history)
            likely = np.intersect1d(allowed, eager)
            token = int(random.choice(likely if len(likely) and random.random() < 0.7 else allowed))
            history.append(token)
            assert plain.consume_token(token)
            follower.take(token, 0)
            if token == END:
                break
            if random.random() < 0.05:
                book.admit([_admission(constraint, history)])
                assert book.rows[0].ahead == follower.ahead
    assert num_ahead > 60


def _admission(constraint: Constraint, history: list[int]) -> Admission:
    sampling = SamplingParams(constraint=constraint)
    return Admission(0, pack_u32(PROMPT + history), len(PROMPT), b"", 0, 1000, 0, pack_u32([END]), sampling)


def test_a_grammar_that_forces_for_ever_is_looked_at_in_pieces(book):
    book.admit([_admission(Constraint(ConstraintKind.REGEX, "(abc ){3000}"), [])])
    follower = book.rows[0]
    said: list[int] = []
    while follower.ahead and len(said) < 9000:
        said += follower.ahead
        follower.jump(list(follower.ahead))
    assert not follower.fault
    text = vocabulary().decode_bytes(said)
    assert text and (b"abc " * 3000).startswith(text) and len(said) > MOST_AHEAD
