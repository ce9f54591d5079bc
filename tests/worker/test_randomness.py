"""The random number of a token is a function of seed, sequence, position and vocabulary id: whatever happens to a row, its tokens stay."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable

import pytest
import torch
from worker.plan_driver import Driver, Job
from worker.tiny_model import load_tiny

from pagecast_kernels.reference import gumbel_noise
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.backend import cuda_operators

NUM_BLOCKS, VOCAB, SEED = 80, 512, 0xDEADBEEF_12345678
PROMPT = [(37 * i) % 500 + 3 for i in range(40)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), NUM_BLOCKS)


def jobs() -> list[Job]:
    """Three sequences of one request."""
    return [Job(PROMPT, 12, SamplingParams(temperature=1.1, top_p=0.95, seed=SEED), sequence=sequence) for sequence in range(3)]


def together(driver: Driver, wanted: list[Job]) -> None:
    driver.start(wanted)
    driver.finish()


def one_after_the_other(driver: Driver, wanted: list[Job]) -> None:
    for job in wanted[::-1]:
        together(driver, [job])


def in_company_and_small_chunks(driver: Driver, wanted: list[Job]) -> None:
    company = [Job(PROMPT[n:], 30, SamplingParams(temperature=0.7, seed=n)) for n in range(1, 4)]
    driver.start(company)
    driver.start(wanted, chunk=7)
    while not all(job.done for job in wanted):
        driver.plan()


def preempted_twice(driver: Driver, wanted: list[Job]) -> None:
    driver.start(wanted)
    for order in (1, -1):
        driver.plan()
        driver.plan()
        for job in wanted:
            driver.release(job)
        driver.start(wanted[::order], chunk=11)
    driver.finish()


def several_steps_a_plan(driver: Driver, wanted: list[Job]) -> None:
    driver.start(wanted)
    while not all(job.done for job in wanted):
        driver.plan(num_steps=4)


def outputs(executor, way: Callable[[Driver, list[Job]], None]) -> list[list[int]]:
    wanted = jobs()
    way(Driver(executor, NUM_BLOCKS, max_num_seqs=8, max_model_len=128), wanted)
    return [job.output for job in wanted]


@pytest.mark.parametrize("way", [one_after_the_other, in_company_and_small_chunks, preempted_twice, several_steps_a_plan])
def test_tokens_do_not_depend_on_what_happens_to_a_row(executor, way):
    expected = outputs(executor, together)
    assert len({tuple(output) for output in expected}) == 3, "sequences of one seed differ"
    assert outputs(executor, way) == expected


def test_same_tokens_from_the_triton_operators(executor, monkeypatch):
    expected = outputs(executor, together)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    assert outputs(executor, preempted_twice) == expected


def test_noise_is_a_function_of_its_four_numbers():
    """Each of them matters, and rows do not see each other."""
    columns = torch.tensor([[7, 0, 3], [8, 0, 3], [7, 1, 3], [7, 0, 4], [7 + (1 << 40), 0, 3], [-7, 0, 3]])
    whole = gumbel_noise(columns[:, 0], columns[:, 1], columns[:, 2], VOCAB)
    for row, (seed, sequence, position) in enumerate(columns.tolist()):
        alone = gumbel_noise(torch.tensor([seed]), torch.tensor([sequence]), torch.tensor([position]), VOCAB + 3)
        assert torch.equal(alone[0, :VOCAB], whole[row]), "also of the size of the vocabulary it is independent"
    assert len({tuple(row) for row in whole.tolist()}) == len(columns)
    assert len(set(whole[0].tolist())) > VOCAB - 5
