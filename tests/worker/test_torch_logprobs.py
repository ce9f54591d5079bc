"""Log-probabilities of SmolLM2-135M in float32 beside those of transformers, of outputs and of prompts, whatever rules rows have."""

import numpy as np
import pytest
import torch
from worker.plan_driver import Driver, Job
from worker.smollm2 import logits_of, model_file, prompts

from pagecast_wire.codec import view_u32
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor

NUM_BLOCKS, CLOSE = 100, 1e-3


@pytest.fixture(scope="module")
def executor():
    torch.set_num_threads(1)
    config = WorkerConfig(run_dir="/unused", model=str(model_file()), device="cpu", dtype="float32", num_blocks=NUM_BLOCKS, max_num_seqs=4)
    made = TorchExecutor(config)
    made.load(lambda progress: None)
    yield made
    made.close()


def f32(column: bytes) -> np.ndarray:
    return np.frombuffer(column, "<f4")


def check_line(wanted: torch.Tensor, token: int, chosen: float, ids: list[int], values: np.ndarray) -> None:
    """wanted float32[V]: transformers' log-softmax. Ids may differ from its order only where values tie within CLOSE."""
    assert abs(chosen - float(wanted[token])) <= CLOSE
    assert len(set(ids)) == len(ids) == len(values)
    best = wanted.topk(len(ids)).values.numpy() if len(ids) else np.zeros(0)
    assert np.abs(values - best).max(initial=0) <= CLOSE
    assert np.abs(values - wanted[ids].numpy()).max(initial=0) <= CLOSE


def outputs_of(results: list[StepResult], steps: list[list[Job]]) -> dict[int, list[tuple[float, list[int], np.ndarray]]]:
    """By job: a line for each of its output tokens."""
    lines: dict[int, list[tuple[float, list[int], np.ndarray]]] = {}
    for result, jobs in zip(results, steps, strict=True):
        at, values, counts = view_u32(result.logprob_rows).tolist(), f32(result.logprobs), view_u32(result.top_counts).tolist()
        ids, best, begin = view_u32(result.top_ids).tolist(), f32(result.top_logprobs), 0
        for place, value, count in zip(at, values, counts, strict=True):
            line = (float(value), ids[begin : begin + count], best[begin : begin + count])
            lines.setdefault(id(jobs[place]), []).append(line)
            begin += count
    return lines


def test_outputs_of_rows_with_and_without_rules(executor):
    """The distribution told is the model's own, also where a penalty and a temperature changed what was drawn."""
    texts = prompts()
    jobs = [
        Job(texts[0], 6, SamplingParams(temperature=0.0, num_logprobs=5)),
        Job(texts[2], 6, SamplingParams(temperature=0.0)),
        Job(texts[3], 6, SamplingParams(temperature=1.5, seed=3, repetition_penalty=1.4, num_logprobs=20)),
        Job(texts[4], 6, SamplingParams(temperature=0.8, seed=4, num_logprobs=0)),
    ]
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4)
    results, steps = [], []
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    while not all(job.done for job in jobs):
        driver.submit()
        steps.append(driver.in_flight[-1][1])
        results.append(driver.collect())
    lines = outputs_of(results, steps)
    assert [len(lines.get(id(job), [])) for job in jobs] == [6, 0, 6, 6]
    for job in jobs:
        wanted = torch.log_softmax(logits_of(job.prompt + job.output)[len(job.prompt) - 1 :], -1)
        for at, (chosen, ids, values) in enumerate(lines.get(id(job), [])):
            assert len(ids) == job.sampling.num_logprobs
            check_line(wanted[at], job.output[at], chosen, ids, values)


@pytest.mark.parametrize("chunk", [None, 7])
def test_prompts_whole_and_in_chunks(executor, chunk):
    """Every token from the second on, once; nothing of a history that follows the prompt."""
    long, short = prompts()[5], prompts()[1]
    jobs = [
        Job(long, 1, SamplingParams(temperature=0.0, num_prompt_logprobs=3)),
        Job(short, 6, SamplingParams(temperature=0.0, num_prompt_logprobs=0), output=logits_of(short)[-1:].argmax(-1).tolist() * 3),
    ]
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4)
    for job in jobs:
        driver.admit(job)
    told: dict[int, dict[int, tuple[float, list[int], np.ndarray]]] = {job.row: {} for job in jobs}
    while any(job.computed < job.known for job in jobs):
        for job in jobs:
            if job.computed < job.known:
                driver.chunk(job, chunk)
        result = driver.plan()
        values, ids, best = f32(result.prompt_logprobs), view_u32(result.prompt_top_ids).tolist(), f32(result.prompt_top_logprobs)
        columns = (result.prompt_rows, result.prompt_starts, result.prompt_counts, result.prompt_tops)
        first, begin = 0, 0
        for row, start, count, num in zip(*(view_u32(column).tolist() for column in columns), strict=True):
            for at in range(count):
                assert start + at not in told[row]
                told[row][start + at] = (float(values[first + at]), ids[begin : begin + num], best[begin : begin + num])
                begin += num
            first += count
        assert first == len(values) and begin == len(ids) == len(best)
    for job in jobs:
        assert sorted(told[job.row]) == list(range(1, len(job.prompt)))
        wanted = torch.log_softmax(logits_of(job.prompt), -1)
        for position, (chosen, ids, best) in told[job.row].items():
            assert len(ids) == job.sampling.num_prompt_logprobs
            check_line(wanted[position - 1], job.prompt[position], chosen, ids, best)
