"""Structured output on the vocabulary of SmolLM2: whatever random logits would choose, the text is valid."""

import json
import re
import threading
from functools import cache
from random import Random

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from worker.plan_driver import Driver, Job, Later
from worker.random_schemas import schema_text
from worker.smollm2 import model_file
from worker.tiny_model import wide_executor

from pagecast_kernels.reference_token_rules import EARLY
from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import Admission
from pagecast_wire.result import FLAG_DEAD, FLAG_LARGE, FLAG_STOP
from pagecast_wire.sampling import Constraint, ConstraintFault, ConstraintKind, SamplingParams
from pagecast_worker.config import WorkerConfig
from pagecast_worker.constraints import ConstraintBook
from pagecast_worker.torch_executor import TorchExecutor
from pagecast_worker.vocabulary import load_vocabulary

VOCAB, END, PROMPT = 49152, 2, [100, 200, 300]
EMAIL, LARK = r"[a-z]{1,8}@[a-z]{2,6}\.(com|org)", 'start: "a" start "b" | "c"'
CHOICES = ["yes", "no", 'a "quoted"\nline', "größer"]


@cache
def vocabulary():
    return load_vocabulary(model_file(), VOCAB, [END])


@pytest.fixture(scope="module")
def book():
    made = ConstraintBook(vocabulary, VOCAB, [END])
    yield made
    made.close()


@cache
def eager_ids() -> np.ndarray:
    """Tokens that bring a random JSON text to its end."""
    return np.array([i for i in range(VOCAB) if vocabulary().decode_bytes([i])[-1:] in (b'"', b"}", b"]")])


def admission(row: int, constraint: Constraint, history: list[int], stops: list[int] | None = None) -> Admission:
    return Admission(
        row, pack_u32(PROMPT + history), len(PROMPT), b"", 0, 1000, 0, pack_u32(stops or [END]), SamplingParams(constraint=constraint)
    )  # fmt: skip


def generate(book: ConstraintBook, constraints: list[Constraint], seed: int, most: int = 300) -> list[list[int]]:
    """Outputs of rows that draw at random among what their masks allow; rows are admitted again with their history now and then."""
    random, noise = Random(seed), np.random.default_rng(seed)
    outputs: list[list[int]] = [[] for _ in constraints]
    book.admit([admission(row, constraint, []) for row, constraint in enumerate(constraints)])
    for _ in range(most):
        open_rows = [row for row, output in enumerate(outputs) if output[-1:] != [END]]
        if not open_rows:
            break
        followers, kinds = [book.rows[row] for row in open_rows], np.zeros(len(open_rows), np.int32)
        masks = book.masks(followers, np.arange(len(open_rows)), kinds)
        for at, (row, follower) in enumerate(zip(open_rows, followers)):
            assert masks.index[at] == at, follower
            allowed = np.unpackbits(masks.words[at].view(np.uint8), bitorder="little")[:VOCAB]
            logits = noise.gumbel(size=VOCAB).astype(np.float32)
            logits[eager_ids()] += 7
            token = int(np.where(allowed, logits, -np.inf).argmax())
            outputs[row].append(token)
            assert follower.take(token, FLAG_STOP if token == END else 0) == (FLAG_STOP if token == END else 0)
            assert not follower.fault
            if random.random() < 0.03 and token != END:
                book.release([row])
                book.admit([admission(row, constraints[row], outputs[row])])
    assert all(output[-1] == END for output in outputs), "a text does not come to an end"
    return outputs


def text_of(output: list[int]) -> str:
    """Strict: the bytes are UTF-8, and the last token is the only end token."""
    assert output[-1] == END and END not in output[:-1]
    return vocabulary().decode_bytes(output[:-1]).decode()


@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_schemas(book, part):
    seeds = range(50 * part, 50 * part + 50)
    texts = [schema_text(seed) for seed in seeds]
    for schema, output in zip(texts, generate(book, [Constraint(ConstraintKind.JSON_SCHEMA, text) for text in texts], part)):
        jsonschema.validate(json.loads(text_of(output)), json.loads(schema), jsonschema.Draft202012Validator)


def check_text(constraint: Constraint, text: str) -> None:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            assert isinstance(json.loads(text), dict)
        case ConstraintKind.REGEX:
            assert re.fullmatch(constraint.text, text)
        case ConstraintKind.CHOICES:
            assert text in json.loads(constraint.text)
        case ConstraintKind.GRAMMAR:
            assert re.fullmatch("a*cb*", text) and text.count("a") == text.count("b")
        case ConstraintKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), json.loads(constraint.text), jsonschema.Draft202012Validator)


OTHERS = [
    Constraint(ConstraintKind.JSON_OBJECT), Constraint(ConstraintKind.REGEX, EMAIL), Constraint(ConstraintKind.GRAMMAR, LARK),
    Constraint(ConstraintKind.CHOICES, json.dumps(CHOICES)),
]  # fmt: skip


def test_every_other_kind(book):
    wanted = OTHERS * 5
    for constraint, output in zip(wanted, generate(book, wanted, 77)):
        check_text(constraint, text_of(output))


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    with wide_executor(tmp_path_factory.mktemp("wide"), VOCAB, END) as made:
        yield made


def sampling(constraint: Constraint | None, seed: int, **values) -> SamplingParams:
    ids = eager_ids()
    return SamplingParams(
        seed=seed, constraint=constraint, logit_bias_ids=pack_u32(ids), logit_bias_values=np.full(len(ids), 7, "<f4").tobytes(), **values
    )  # fmt: skip


def jobs() -> list[Job]:
    constraints = [*OTHERS, *(Constraint(ConstraintKind.JSON_SCHEMA, schema_text(seed)) for seed in range(300, 304))]
    return [Job(PROMPT, 240, sampling(constraint, seed), [END]) for seed, constraint in enumerate(constraints)]


def start(driver: Driver, wanted: list[Job]) -> None:
    for job in wanted:
        driver.admit(job)
        driver.chunk(job)


def test_whole_executor_with_plain_rows_beside(executor):
    wanted, plain, alone = jobs(), Job(PROMPT, 20, SamplingParams(seed=9)), Job(PROMPT, 20, SamplingParams(seed=9))
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, [alone])
    driver.finish()
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, [*wanted[:4], plain, *wanted[4:]])
    driver.finish()
    for job in wanted:
        assert job.flags[-1] == FLAG_STOP, job.output
        check_text(job.sampling.constraint, text_of(job.output))
    assert plain.output == alone.output


def test_plans_ahead_of_results_and_preemption_change_nothing(executor, monkeypatch):
    """Two plans in flight on a device that takes its time: masks wait for the tokens that they follow from, rows that a plan ahead
    empties or fills again do not disturb those before, and nobody needs a step's logits when the next one writes over them."""
    expected = jobs()
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, expected)
    driver.finish()
    staging = executor.backend.staging
    download = staging.download
    monkeypatch.setattr(staging, "download", lambda: Later(download()))
    begin = executor._begin

    def write_over(*given):
        executor.logits.fill_(float("nan"))
        return begin(*given)

    monkeypatch.setattr(executor, "_begin", write_over)
    wanted = jobs()
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, wanted)
    driver.submit()
    for step in range(200):
        if step == 3:  # one starts over in the plan ahead, with what it had by then
            lost = next(job for job in wanted if job.row >= 0 and not job.done and len(expected[wanted.index(job)].output) > 10)
            driver.collect()
            driver.release(lost)
            start(driver, [lost])
        driver.submit()
        if len(driver.in_flight) > 1:
            driver.collect()
        for job in [job for job in driver.rows.values() if job.done]:
            driver.release(job)
        if not driver.rows:
            break
    while driver.in_flight:
        driver.collect()
    assert [job.output for job in wanted] == [job.output for job in expected]


def test_sequences_of_one_request_differ_and_are_all_valid(executor):
    constraint = Constraint(ConstraintKind.REGEX, "[a-z ]{10,30}")
    wanted = [Job(PROMPT, 40, sampling(constraint, seed), [END]) for seed in range(4)]
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, wanted)
    driver.finish()
    texts = {text_of(job.output) for job in wanted}
    assert len(texts) == 4 and all(re.fullmatch(constraint.text, text) for text in texts)


def test_the_end_token_ends_a_structure_also_with_ignore_eos(executor):
    job = Job(PROMPT, 40, sampling(Constraint(ConstraintKind.REGEX, "[ab]{3}"), 1), [])
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, [job])
    driver.finish()
    assert job.flags[-1] == FLAG_STOP and re.fullmatch("[ab]{3}", text_of(job.output))


def test_min_output_tokens_give_way_to_a_finished_structure(executor):
    """As long as the structure can go on it must; once it is complete it ends."""
    open_end = Job(PROMPT, 40, sampling(Constraint(ConstraintKind.REGEX, "[ab]*"), 1), [END], min_output=6)
    closed = Job(PROMPT, 40, sampling(Constraint(ConstraintKind.REGEX, "[ab]"), 1), [END], min_output=6)
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, [open_end, closed])
    driver.finish()
    assert len(open_end.output) > 6 and open_end.output[-1] == END
    assert len(closed.output) == 2 and closed.flags[-1] == FLAG_STOP


def test_rules_that_leave_no_token_kill_their_row_alone(executor):
    digits = Constraint(ConstraintKind.REGEX, "[0-9]+x")
    dead = Job(PROMPT, 10, SamplingParams(seed=1, constraint=digits, allowed_token_ids=pack_u32([END, 100])), [END])
    fine = Job(PROMPT, 30, sampling(digits, 2), [END])
    driver = Driver(executor, 200, max_model_len=256)
    start(driver, [dead, fine])
    driver.plan()
    assert dead.flags == [FLAG_DEAD]
    driver.release(dead)
    driver.finish()
    assert re.fullmatch(digits.text, text_of(fine.output)) or len(fine.output) == 30


def test_a_constraint_that_outgrows_the_limits(monkeypatch):
    """To compile, it is refused; while it is followed, its row dies and says why."""
    small = ConstraintBook(vocabulary, VOCAB, [END])
    monkeypatch.setattr("pagecast_worker.constraints.limits", lambda: LLParserLimits(max_grammar_size=5, verbose_errors=False))
    large = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}, "b": {"enum": ["x", "y"]}}}'
    small.admit([admission(0, Constraint(ConstraintKind.JSON_SCHEMA, large), [])])
    monkeypatch.setattr("pagecast_worker.constraints.limits", lambda: LLParserLimits(step_lexer_fuel=5, verbose_errors=False))
    small.admit([admission(1, Constraint(ConstraintKind.REGEX, "(alpha|beta|gamma|[a-z]{3,9}-[0-9]+)+"), [])])
    monkeypatch.undo()
    many = json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}, "additionalProperties": False})
    small.admit([admission(2, Constraint(ConstraintKind.JSON_SCHEMA, many), [])])
    assert not small.rows[2].fault
    small.rows[2].jump(vocabulary().tokenize_str('{"'))  # to where each of the properties may stand
    followers, kinds = [small.rows[at] for at in range(3)], np.full(3, EARLY, np.int32)
    assert followers[0].fault == ConstraintFault.TOO_LARGE and not followers[1].fault
    assert small.masks(followers, np.arange(3), kinds).index.tolist() == [-1, -1, -1]
    for follower in followers:
        assert follower.take(5, 0) == FLAG_DEAD | FLAG_LARGE
        assert follower.take(6, FLAG_STOP) == FLAG_STOP  # beyond its end: whatever the device says
    small.close()


@pytest.mark.parametrize(
    ("constraint", "fault"),
    [
        (OTHERS[1], ConstraintFault.NONE),
        (Constraint(ConstraintKind.REGEX, "(unclosed"), ConstraintFault.INVALID),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "strange"}'), ConstraintFault.INVALID),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{not json"), ConstraintFault.INVALID),
        (Constraint(ConstraintKind.CHOICES, "[]"), ConstraintFault.INVALID),
        (Constraint(ConstraintKind.GRAMMAR, "start: missing"), ConstraintFault.INVALID),
    ],
)
def test_prepare_answers_once_with_what_is_wrong(book, constraint, fault, monkeypatch):
    monkeypatch.setattr("pagecast_worker.constraints.COMPILE_SECONDS", 60.0)
    answered, answers = threading.Event(), []
    book.prepare(constraint, lambda digest, found: (answers.append(found), answered.set()))
    assert answered.wait(60)
    assert answers == [fault]


def test_prepare_gives_up_in_time(monkeypatch):
    """The vocabulary is not the constraint's fault: the clock starts when it is there."""
    monkeypatch.setattr("pagecast_worker.constraints.COMPILE_SECONDS", 0.05)
    release, answered, answers = threading.Event(), threading.Event(), []
    monkeypatch.setattr("pagecast_worker.constraints.grammar_of", lambda constraint, vocabulary: release.wait(60) and "")
    slow = ConstraintBook(vocabulary, VOCAB, [END])
    slow.prepare(OTHERS[0], lambda digest, found: (answers.append(found), answered.set()))
    assert answered.wait(60)
    release.set()
    slow.close()
    assert answers == [ConstraintFault.TIMED_OUT]


def test_without_a_vocabulary_constraints_are_refused(tmp_path):
    none = ConstraintBook(lambda: load_vocabulary(tmp_path, VOCAB, [END]), VOCAB, [END])
    answered, answers = threading.Event(), []
    none.prepare(OTHERS[0], lambda digest, found: (answers.append(found), answered.set()))
    assert answered.wait(60)
    none.close()
    assert answers == [ConstraintFault.INVALID]


def test_real_weights(book):
    """A few texts of the model itself, greedy."""
    torch.set_num_threads(1)
    config = WorkerConfig(run_dir="/unused", model=str(model_file()), device="cpu", dtype="float32", num_blocks=100, max_num_seqs=4)
    made = TorchExecutor(config)
    made.load(lambda progress: None)
    person = {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"], "additionalProperties": False,
    }  # fmt: skip
    prompt = vocabulary().tokenize_str("A person as JSON: ")
    wanted = [
        Job(prompt, 80, SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(person))), [END]),
        Job(prompt, 40, SamplingParams(temperature=0.0, constraint=OTHERS[1]), [END]),
        Job(prompt, 40, SamplingParams(temperature=0.0, constraint=OTHERS[3]), [END]),
    ]  # fmt: skip
    driver = Driver(made, 100, max_num_seqs=4, max_model_len=256)
    start(driver, wanted)
    driver.finish()
    made.close()
    for job in wanted:
        check_text(job.sampling.constraint, text_of(job.output))
