"""Padded steps with prefill chunks compute what unpadded ones do: random plans, with graphs replaced by computing them here."""

import os
from functools import partial

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from worker.graphs_here import MixedHere, ReplayedHere
from worker.plan_driver import Driver, Job
from worker.tiny_model import load_tiny, write_config

from pagecast_wire.sampling import SamplingParams
from pagecast_worker.backend import cuda_operators
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.mixed_graphs import MixedGraphs, Size, empty_step, sizes_for, view_step, worth_filling
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.models.registry import architecture
from pagecast_worker.parallel import Mute, Ranks
from pagecast_worker.steps import decode_step, padded_step

NUM_BLOCKS = 60
SIZES = [Size(8, 2, 3, 5), Size(16, 8, 3, 8), Size(24, 8, 3, 8), Size(56, 8, 3, 8)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), NUM_BLOCKS)


def random_outputs(executor, seed: int, count: int = 10, longest: int = 60) -> list[list[int]]:
    """Sequences that come and go, prefilled in random chunks beside those that decode."""
    random = np.random.default_rng(seed)
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=8, max_model_len=128)
    jobs = []
    for n in range(count):
        sampling = SamplingParams(temperature=0.0) if n % 2 else SamplingParams(temperature=0.9, top_k=40, seed=seed + n)
        prompt = random.integers(3, 500, random.integers(1, longest)).tolist()
        jobs.append(Job(prompt, int(random.integers(1, 9)), sampling, stop_token_ids=[7, 9], min_output=n % 5 == 4 and 2))
    waiting = list(jobs)
    while waiting or driver.rows:
        for job in [job for job in driver.rows.values() if job.done]:
            driver.release(job)
        while waiting and len(driver.rows) < 8 and random.random() < 0.6:
            driver.admit(waiting.pop(0))
        for job in driver.rows.values():
            if job.computed < job.known and random.random() < 0.7:
                driver.chunk(job, int(random.integers(1, 30)))
        driver.plan()
    return [job.output for job in jobs]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_padded_steps_give_the_same_tokens(executor, monkeypatch, seed):
    expected = random_outputs(executor, seed)
    mixed = MixedHere(partial(padded_step, executor), SIZES, executor.state.padding)
    monkeypatch.setattr(executor, "_mixed_graphs", mixed)
    graphs = ReplayedHere(partial(decode_step, executor), [1, 2, 4, 8], executor.state.padding, torch.device("cpu"))
    monkeypatch.setattr(executor, "_graphs", graphs)
    assert random_outputs(executor, seed) == expected
    assert len(set(mixed.used)) > 1


def test_padded_steps_of_the_triton_operators(executor, monkeypatch):
    expected = random_outputs(executor, 4, count=3, longest=20)
    mixed = MixedHere(partial(padded_step, executor), SIZES, executor.state.padding)
    monkeypatch.setattr(executor, "_mixed_graphs", mixed)
    monkeypatch.setattr(executor, "ops", cuda_operators(executor.config, executor.model, torch.device("cpu")))
    assert random_outputs(executor, 4, count=3, longest=20) == expected
    assert mixed.used


def test_a_step_of_nothing_but_padding_changes_no_row(executor):
    before = [tensor.clone() for tensor in (executor.state.scalars[:, :-1], *executor.cache.layers[0])]
    size = SIZES[0]
    buffer = torch.from_numpy(empty_step(size, executor.state.padding))
    with torch.inference_mode():
        padded_step(executor, view_step(size, buffer))
    after = [executor.state.scalars[:, :-1], *executor.cache.layers[0]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_every_step_puts_its_logits_into_one_buffer(executor):
    padding = executor.state.padding
    with torch.inference_mode():
        padded = padded_step(executor, view_step(SIZES[1], torch.from_numpy(empty_step(SIZES[1], padding))))
        decoded = decode_step(executor, torch.full((3,), padding, dtype=torch.int32))
    assert [step.logits.data_ptr() for step in (padded, decoded)] == [executor.logits.data_ptr()] * 2
    assert [len(step.logits) for step in (padded, decoded)] == [8, 3]


@pytest.mark.parametrize(("too_large", "ready"), [((), [3, 0, 1, 2]), ((3,), [0, 1, 2]), ((1,), [3, 0]), ((3, 1), [0])])
def test_the_largest_is_captured_first_and_the_rest_without_it_where_it_does_not_fit(executor, monkeypatch, too_large, ready):
    mixed = MixedGraphs(partial(padded_step, executor), SIZES, executor.state.padding, torch.device("cpu"))
    monkeypatch.setattr(mixed, "_try_capture", lambda size, pool: SIZES.index(size) not in too_large)
    done = []
    mixed.capture(None, bool, lambda count, total: done.append((count, total)))
    assert mixed.ready == [SIZES[index] for index in ready]
    assert done[-1] == (4, 4)


def test_sizes_suit_the_model():
    small = sizes_for(256, 16384, 135_000_000)
    large = sizes_for(256, 16384, 8_000_000_000)
    assert max(size.tokens for size in small) == 4096
    assert max(size.tokens for size in large) <= 1000
    assert all(size.samples <= 256 and size.decodes <= size.tokens and size.chunks <= size.tokens for size in small + large)
    assert {size.decodes for size in sizes_for(5, 2048, 1)} == {5}
    measured = sizes_for(256, 16384, 8_000_000_000, measured=True)
    assert {size.tokens for size in measured} - {size.tokens for size in large} == {448}


def test_the_work_of_a_token_is_one_ranks_share_of_it(tmp_path):
    config, _ = read_config(write_config(tmp_path))

    def work(ranks: int) -> int:
        names = architecture(config.architecture).names
        return Decoder(config, names, Ranks(0, ranks, Mute()), torch.device("meta"), torch.float32, 64).parameters_of_a_token()

    assert work(2) == work(1) // 2 > 0


def test_steps_fill_only_captured_sizes_of_large_models():
    ready = sizes_for(256, 16384, 8_000_000_000, measured=True)
    assert worth_filling(ready, 8_000_000_000) == (256, 320, 384, 512, 640, 768, 896)
    assert worth_filling(ready[-1:] + ready[:5], 8_000_000_000) == (256, 320), "capturing may have ended early"
    assert worth_filling([], 8_000_000_000) == ()
    assert worth_filling(sizes_for(256, 16384, 135_000_000), 135_000_000) == ()
