"""On a GPU only: token rules, constraints and log-probabilities through graphs and with plans ahead, held against the CPU."""

import numpy as np
import pytest
import torch
from worker import test_constraints, test_token_rules
from worker.plan_driver import Driver, Job
from worker.smollm2 import model_file
from worker.tiny_model import write_config, write_model

from pagecast_wire.result import FLAG_STOP
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def made_on(device: str, folder: str, **options) -> TorchExecutor:
    torch.backends.cuda.matmul.allow_tf32 = False
    values = {"model": folder, "dtype": "float32", "num_blocks": 200, "max_num_seqs": 16} | options
    executor = TorchExecutor(WorkerConfig(run_dir="/unused", device=device, **values))
    executor.load(lambda progress: None)
    return executor


def drive(executor: TorchExecutor, jobs: list[Job], ahead: bool, length: int = 200) -> None:
    """Prefill together, then decode, with one plan ahead of the results or none."""
    driver = Driver(executor, 200, max_num_seqs=16, max_model_len=length)
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    driver.submit()
    while not all(job.done for job in jobs):
        if ahead:
            driver.submit()
        driver.collect()
        if not ahead and not all(job.done for job in jobs):
            driver.submit()
    while driver.in_flight:
        driver.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_rules_against_float64(folder, eager, ahead):
    gpu, cpu = made_on("cuda", folder, enforce_eager=eager), made_on("cpu", folder)
    jobs = [
        *test_token_rules.jobs(),
        Job(test_token_rules.PROMPT, 8, SamplingParams(temperature=0.0, **test_token_rules.bad_words([12, 7], [9])), [5, 6], min_output=3),
    ]
    drive(gpu, jobs, ahead)
    test_token_rules.check(cpu, jobs)
    gpu.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_constrained_rows(tmp_path, ahead):
    shape = write_config(tmp_path / "wide", vocab_size=test_constraints.VOCAB, eos_token_id=test_constraints.END)
    gpu = made_on("cuda", str(model_file()), random_weights=str(shape))
    jobs = [*test_constraints.jobs(), Job(test_constraints.PROMPT, 60, SamplingParams(seed=9))]
    drive(gpu, jobs, ahead, 256)
    for job in jobs[:-1]:
        assert job.flags[-1] == FLAG_STOP
        test_constraints.check_text(job.sampling.constraint, test_constraints.text_of(job.output))
    gpu.close()


def test_logprobs_of_outputs_and_prompts(folder):
    """The same requests on both devices: greedy, with log-probabilities of both kinds, the prompt in one chunk and in several."""
    told = []
    for device in ("cuda", "cpu"):
        executor = made_on(device, folder)
        driver = Driver(executor, 200, max_num_seqs=16, max_model_len=200)
        job = Job([(5 * i) % 500 + 3 for i in range(150)], 4, SamplingParams(temperature=0.0, num_logprobs=4, num_prompt_logprobs=3))
        driver.admit(job)
        values: list[float] = []
        while not job.done:
            if job.computed < job.known:
                driver.chunk(job, 70)
            result = driver.plan()
            values += np.frombuffer(result.prompt_logprobs + result.prompt_top_logprobs, "<f4").tolist()
            values += np.frombuffer(result.logprobs + result.top_logprobs, "<f4").tolist()
        told.append((job.output, torch.tensor(values)))
        executor.close()
    assert told[0][0] == told[1][0]
    assert len(told[0][1]) == 149 * 4 + 4 * 5
    assert (told[0][1] - told[1][1]).abs().max() < 1e-3
