"""The torch executor on the CPU against transformers: greedy tokens of SmolLM2-135M, whatever the scheduler does to a request."""

import pytest
import torch
from worker.plan_driver import Driver, Job
from worker.smollm2 import first_difference, logits_of, model_file, prompts

from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor

NUM_BLOCKS = 1200
OUTPUT = 64


@pytest.fixture(scope="module")
def executor():
    torch.set_num_threads(1)  # the machine is shared, and threads that wait for each other spin
    config = WorkerConfig(run_dir="/unused", model=str(model_file()), device="cpu", dtype="float32", num_blocks=NUM_BLOCKS, max_num_seqs=16)
    made = TorchExecutor(config)
    facts, num_blocks = made.load(lambda progress: None)
    assert (facts.vocab_size, facts.num_layers, facts.eos_token_ids, num_blocks) == (49152, 30, (2,), NUM_BLOCKS)
    assert facts.num_parameters == 134_515_008
    yield made
    made.close()


@pytest.fixture
def driver(executor):
    return Driver(executor, NUM_BLOCKS)


def check(jobs):
    for job in jobs:
        assert len(job.output) == job.max_output
        assert first_difference(job.prompt, job.output) == ""


def test_alone(driver):
    job = Job(prompts()[0], OUTPUT)
    driver.admit(job)
    driver.chunk(job)
    driver.plan()
    driver.finish()
    check([job])


def test_sixteen_at_once_arriving_in_two_waves(driver):
    texts = prompts()
    jobs = [Job(texts[i % len(texts)], OUTPUT if i < 6 else 8 + i) for i in range(16)]
    for wave in (jobs[:5], jobs[5:]):
        for job in wave:
            driver.admit(job)
            driver.chunk(job)
        driver.plan()
        driver.plan()
    driver.finish()
    check(jobs)


def test_prefill_in_chunks_of_32_beside_decoding_rows(driver):
    short, long = Job(prompts()[1], 24), Job(prompts()[5], 24)
    driver.admit(short)
    driver.chunk(short)
    driver.plan()
    driver.admit(long)
    while long.computed < long.known:
        driver.chunk(long, 32)
        driver.plan()
    driver.finish()
    check([short, long])


def test_preempted_rows_go_on_where_they_were(driver):
    jobs = [Job(tokens, 32) for tokens in prompts()[:3]]
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    for _ in range(9):
        driver.plan()
    driver.release(jobs[1])
    driver.plan()
    driver.plan()
    driver.admit(jobs[1])
    driver.chunk(jobs[1])
    driver.finish()
    check(jobs)


def test_blocks_of_a_shared_prefix_are_read_where_they_are(driver):
    tokens = prompts()[5]
    first = Job(tokens, 16)
    driver.admit(first)
    driver.chunk(first)
    second = Job(tokens[:96] + prompts()[0], 16)
    driver.admit(second, shared=first.blocks[:6])  # computed in this very plan
    driver.chunk(second)
    driver.plan()
    driver.finish()
    check([first, second])


def test_several_steps_in_one_plan(driver):
    jobs = [Job(tokens, count) for tokens, count in zip(prompts()[:3], (13, 24, 5))]
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    while not all(job.done for job in jobs):
        driver.plan(num_steps=4)
    check(jobs)


def test_plans_may_run_ahead_of_their_results(driver):
    job = Job(prompts()[3], 20)
    driver.admit(job)
    driver.chunk(job)
    driver.submit()
    for _ in range(19):
        driver.submit()
        driver.collect()
    driver.collect()
    check([job])


def test_paused_rows_sit_out_and_go_on(driver):
    jobs = [Job(tokens, 12) for tokens in prompts()[:2]]
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    for _ in range(4):
        driver.plan(paused=(jobs[0].row,))
    assert [len(job.output) for job in jobs] == [1, 5]
    driver.finish()
    check(jobs)


def test_logits_are_those_of_transformers(executor, driver):
    seen = []
    original = executor.model.logits
    executor.model.logits = lambda *given: seen.append(original(*given).clone()) or seen[-1]
    try:
        job = Job(prompts()[5], 4)
        driver.admit(job)
        driver.chunk(job)
        driver.plan()
        driver.finish()
    finally:
        del executor.model.logits
    expected = logits_of(job.prompt + job.output)[len(job.prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=0, atol=2e-4)
