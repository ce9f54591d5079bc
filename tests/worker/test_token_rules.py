"""Token rules through the whole executor against plain float64 arithmetic over the model's own logits; and by the Triton operators the
same tokens."""

import os

import torch

if not torch.cuda.is_available():  # what a GPU does is asked by test_torch_gpu_rules, with the cases of this file
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
from worker.plan_driver import Driver, Job
from worker.tiny_model import load_tiny

from pagecast_kernels.reference import gumbel_noise
from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.result import FLAG_DEAD, FLAG_IDLE, FLAG_STOP
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.backend import cuda_operators

NUM_BLOCKS, VOCAB = 80, 512


def bad_words(*words: list[int]) -> dict[str, bytes]:
    return {"bad_word_tokens": pack_u32([t for word in words for t in word]), "bad_word_lengths": pack_u32([len(word) for word in words])}


def bias(values: dict[int, float]) -> dict[str, bytes]:
    return {"logit_bias_ids": pack_u32(list(values)), "logit_bias_values": np.array(list(values.values()), "<f4").tobytes()}


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), NUM_BLOCKS)


def drive(executor, epoch: int = 1) -> Driver:
    return Driver(executor, NUM_BLOCKS, max_num_seqs=8, max_model_len=200, epoch=epoch)


def raw_logits(executor, tokens: list[int]) -> np.ndarray:
    """float64 [V]: the model's own, after tokens."""
    seen = []
    logits = executor.model.logits
    executor.model.logits = lambda *given: seen.append(logits(*given)) or seen[-1]
    try:
        driver = drive(executor)
        job = Job(tokens, 1)
        driver.admit(job)
        driver.chunk(job)
        driver.plan()
    finally:
        executor.model.logits = logits
    return seen[-1][-1].double().numpy()


def expected(executor, job: Job, output: list[int]) -> np.ndarray:
    """Scores of every token after `output`, by SamplingParams' definitions; float64."""
    s, history = job.sampling, job.prompt + output
    x = raw_logits(executor, history)
    for token in set(history):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    for token, value in zip(view_u32(s.logit_bias_ids), np.frombuffer(s.logit_bias_values, "<f4")):
        x[token] += value
    allowed = set(view_u32(s.allowed_token_ids).tolist()) or set(range(VOCAB))
    at = 0
    for length in view_u32(s.bad_word_lengths).tolist():
        word = view_u32(s.bad_word_tokens)[at : at + length].tolist()
        at += length
        if length == 1 or history[1 - length :] == word[:-1]:
            allowed -= {word[-1]}
    if len(output) < job.min_output:
        allowed -= set(job.stop_token_ids)
    x[[token for token in range(VOCAB) if token not in allowed]] = -np.inf
    if s.temperature:
        x = x / s.temperature
        if s.min_p:
            x[x < x.max() + np.log(s.min_p)] = -np.inf
        place = [torch.tensor([value]) for value in (s.seed - (s.seed >> 63 << 64), 0, len(history))]
        x = x + gumbel_noise(*place, VOCAB)[0].double().numpy()
    return x


def check(executor, jobs: list[Job]) -> None:
    for which, job in enumerate(jobs):
        assert job.output
        for at, token in enumerate(job.output):
            scores = expected(executor, job, job.output[:at])
            assert scores[token] > scores.max() - 1e-3, f"job {which} took {token} at {at}, the best is {scores.argmax()}"


PROMPT = [3, 40, 77, 40, 9, 11, 300, 12]


def jobs() -> list[Job]:
    """Plain rows between rows with rules of each kind, and of all kinds at once."""
    greedy = {"temperature": 0.0}
    return [
        Job(PROMPT, 8),
        Job(PROMPT, 10, SamplingParams(**greedy, repetition_penalty=1.7)),
        Job(PROMPT[:5], 10, SamplingParams(**greedy, presence_penalty=1.5, frequency_penalty=0.7)),
        Job(PROMPT[1:], 8, SamplingParams(temperature=0.9, seed=5, min_p=0.02)),
        Job(PROMPT, 8, SamplingParams(temperature=1.3, seed=1 << 63, frequency_penalty=-0.8, **bias({5: 4.0, 9: -50.0, 511: 3.0}))),
        Job(PROMPT, 8, SamplingParams(temperature=1.0, seed=11, allowed_token_ids=pack_u32([4, 8, 15, 16, 23, 42, 108]), **bias({4: 2.0}))),
        Job(PROMPT, 8, SamplingParams(temperature=0.7, seed=12, repetition_penalty=0.8, presence_penalty=-0.5, min_p=0.1)),
    ]  # fmt: skip


def test_every_rule_beside_rows_without_any(executor):
    driver, wanted = drive(executor), jobs()
    driver.start(wanted, chunk=3)
    driver.finish()
    check(executor, wanted)
    assert max(wanted[2].output.count(token) for token in wanted[2].output) < 8  # the penalty did something


def test_counts_are_made_again_from_the_history(executor):
    """Preempted in the middle and admitted to another row, a sequence goes on as one that was not."""
    whole = jobs()
    driver = drive(executor)
    driver.start(whole)
    driver.finish()
    again = jobs()
    driver = drive(executor)
    driver.start(again)
    for _ in range(3):
        driver.plan()
    for job in again:
        driver.release(job)
    driver.start(again[::-1])
    driver.finish()
    assert [job.output for job in again] == [job.output for job in whole]


def test_same_tokens_from_the_triton_operators(executor, monkeypatch):
    """In the interpreter; rows of every kind, with bad words and a minimum."""

    def outputs() -> list[list[int]]:
        wanted = [*jobs()[1:], Job(PROMPT, 4, SamplingParams(temperature=0.0, **bad_words([PROMPT[-1], 7], [9])), [5, 6], min_output=2)]
        for job in wanted:
            job.max_output = 4
        driver = drive(executor)
        driver.start(wanted)
        driver.finish()
        return [job.output for job in wanted]

    from_twins = outputs()
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    assert outputs() == from_twins


def test_plans_of_several_steps(executor):
    single, several = jobs(), jobs()
    driver = drive(executor)
    driver.start(single)
    driver.finish()
    driver = drive(executor)
    driver.start(several)
    while not all(job.done for job in several):
        driver.plan(num_steps=3)
    assert [job.output for job in several] == [job.output for job in single]


def test_bad_words_over_the_edge_of_prompt_and_output(executor):
    """Words made of what greedy decoding says: whole, beginning in the prompt, and one that shares a beginning with another."""
    free = Job(PROMPT, 8)
    driver = drive(executor)
    driver.start([free])
    driver.finish()
    said = free.output
    words = [[*PROMPT[-2:], said[0]], said[2:4], [said[2], 400], [said[5]]]
    job = Job(PROMPT, 12, SamplingParams(temperature=0.0, **bad_words(*words)))
    driver = drive(executor)
    driver.start([job])
    driver.finish()
    check(executor, [job])
    text = PROMPT + job.output
    assert not any(text[at : at + len(word)] == word for word in words for at in range(len(text)))
    assert job.output[0] != said[0]


def test_min_output_tokens_beat_every_stop(executor):
    free = Job(PROMPT, 8)
    driver = drive(executor)
    driver.start([free])
    driver.finish()
    stops = sorted(set(free.output))
    eager = SamplingParams(temperature=0.0, **bias({7: 80.0}))
    wanted = [Job(PROMPT, 8, stop_token_ids=stops, min_output=4), Job(PROMPT, 8, eager, [7], 3)]
    driver = drive(executor)
    driver.start(wanted)
    driver.finish()
    check(executor, wanted)
    assert not set(wanted[0].output[:4]) & set(stops) and len(wanted[0].output) > 4
    assert wanted[1].output[-1] == 7 and len(wanted[1].output) == 4 and wanted[1].flags[-1] == FLAG_STOP


def test_a_row_without_any_token_left_is_dead_and_harms_nobody(executor):
    dead = Job(PROMPT, 4, SamplingParams(temperature=1.0, allowed_token_ids=pack_u32([7]), **bad_words([7])))
    alone, beside = Job(PROMPT, 4), Job(PROMPT, 4)
    driver = drive(executor)
    driver.start([alone])
    driver.finish()
    driver = drive(executor)
    driver.start([dead, beside])
    assert dead.flags[0] & FLAG_DEAD
    driver.release(dead)
    driver.finish()
    assert beside.output == alone.output


def test_a_plain_row_after_one_with_rules(executor):
    """The row is the same; nothing of its owner before may be left."""
    plain = Job(PROMPT, 5)
    driver = drive(executor)
    driver.start([plain])
    driver.finish()
    driver = drive(executor)
    first = Job(PROMPT, 3, SamplingParams(temperature=0.0, allowed_token_ids=pack_u32([8])))
    driver.start([first])
    driver.finish()
    biased = Job(PROMPT, 5, SamplingParams(temperature=0.0, **bias({500: 0.0})))
    driver.start([biased])
    driver.finish()
    after = Job(PROMPT, 5)
    driver.start([after])
    driver.finish()
    assert first.output == [8, 8, 8]
    assert after.output == plain.output == biased.output


def test_log_probabilities_in_plans_of_several_steps(executor):
    """As in plans of one step: of every token once, also where a row ends within a plan, and where rules change what is drawn."""

    def told(num_steps: int) -> list[list[tuple[float, list[int]]]]:
        values = {"num_logprobs": 3}
        wanted = [
            Job(PROMPT, 7, SamplingParams(temperature=0.0, **values)), Job(PROMPT[2:], 7),
            Job(PROMPT, 4, SamplingParams(temperature=1.2, seed=4, repetition_penalty=1.6, num_logprobs=1)),
        ]  # fmt: skip
        driver, lines = drive(executor), {id(job): [] for job in wanted}
        for job in wanted:
            driver.admit(job)
            driver.chunk(job)
        while not all(job.done for job in wanted):
            driver.submit(num_steps if driver.step else 1)
            sampled = driver.in_flight[-1][1]
            result = driver.collect()
            ids, chosen, begin = view_u32(result.top_ids).tolist(), np.frombuffer(result.logprobs, "<f4"), 0
            counts = view_u32(result.top_counts).tolist()
            flags = np.frombuffer(result.flags, np.uint8)
            for place, value, count in zip(view_u32(result.logprob_rows).tolist(), chosen.tolist(), counts, strict=True):
                if not flags[place] & FLAG_IDLE:
                    lines[id(sampled[place % len(sampled)])].append((round(value, 4), ids[begin : begin + count]))
                begin += count
        return [lines[id(job)] for job in wanted]

    single = told(1)
    assert [len(line) for line in single] == [7, 0, 4]
    assert told(3) == single
