"""The Triton operators behind the whole executor, in Triton's interpreter, against the CPU's operators: same tokens, same calls."""

import dataclasses
import os
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from worker.plan_driver import Driver, Job
from worker.tiny_model import write_model

from pagecast_kernels import configs
from pagecast_wire.sampling import SamplingParams
from pagecast_worker.backend import cuda_operators
from pagecast_worker.config import WorkerConfig
from pagecast_worker.models import one_row
from pagecast_worker.torch_executor import TorchExecutor

NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    config = WorkerConfig(run_dir="/unused", model=str(folder), device="cpu", dtype="float32", num_blocks=NUM_BLOCKS, max_num_seqs=4)
    made = TorchExecutor(config)
    made.load(lambda progress: None)
    return made


def outputs(executor) -> list[list[int]]:
    """Three sequences of different kinds, one of them prefilled in chunks beside the others."""
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4, max_model_len=128)
    samplings = (
        SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7), SamplingParams(temperature=0.8, top_k=20, seed=9),
    )
    jobs = [Job([(7 * i + 11 * n) % 500 + 3 for i in range(5 + 17 * n)], 6, sampling) for n, sampling in enumerate(samplings)]
    for job in jobs[:2]:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    driver.admit(jobs[2])
    while jobs[2].computed < jobs[2].known:
        driver.chunk(jobs[2], 16)
        driver.plan()
    driver.finish()
    return [job.output for job in jobs]


def test_same_tokens_from_both_sets_of_operators(executor, monkeypatch):
    expected = outputs(executor)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    assert outputs(executor) == expected


def test_operators_that_do_not_depend_on_company_give_the_same_tokens(executor, monkeypatch):
    expected = outputs(executor)
    config = dataclasses.replace(executor.config, batch_invariant=True)
    monkeypatch.setattr(executor, "ops", cuda_operators(config, executor.model, torch.device("cpu")))
    assert outputs(executor) == expected


@pytest.mark.parametrize("rotates", [True, False])
def test_a_request_alone_has_kernels_of_its_own(executor, monkeypatch, rotates):
    """Steps of one row: five launches a layer, or six where another one rotates heads, give the tokens of nine."""
    prompt = [(11 * i) % 500 + 3 for i in range(19)]

    def alone() -> list[int]:
        driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4, max_model_len=128)
        job = Job(prompt, 5, SamplingParams(temperature=0.0))
        driver.admit(job)
        driver.chunk(job)
        driver.finish()
        return job.output

    expected = alone()
    ops = cuda_operators(executor.config, executor.model, torch.device("cpu"))
    assert ops.one_row
    monkeypatch.setattr(configs, "rotates_in_product", lambda device: rotates)
    calls, rotated = [], []
    add, rotating = ops.linear_add, ops.norm_linear_heads
    ops.linear_add = lambda *args: calls.append(1) or add(*args)
    ops.norm_linear_heads = lambda *args: rotated.append(1) or rotating(*args)
    monkeypatch.setattr(executor, "ops", ops)
    assert alone() == expected
    assert len(calls) == 4 * 2 * executor.model.config.num_layers
    assert len(rotated) == 4 * executor.model.config.num_layers * rotates


@pytest.mark.parametrize(
    ("changed", "rotates"),
    [({}, True), ({"q_norm": torch.ones(64)}, False), ({"k_norm": torch.ones(64)}, False), ({"head_dim": 44}, False), (None, False)],
)
def test_a_product_rotates_heads_that_nothing_else_changes(changed, rotates):
    """Nor does it where a head has no equal parts for programs, or (None) where the cache is of e4m3."""
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    cache = torch.zeros(2, 1, 16, 64, dtype=torch.bfloat16)
    made = {"q_norm": None, "k_norm": None, "head_dim": 64, "qkv": SimpleNamespace(weight=x)} | (changed or {})
    assert one_row._rotates(SimpleNamespace(**made), x, cache.to(torch.float8_e4m3fn) if changed is None else cache) == rotates
