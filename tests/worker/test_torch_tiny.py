"""The torch executor on a tiny model: padding, copies, early stops, wrong plans, and what one plan may ask for."""

from functools import partial

import numpy as np
import pytest
import torch
from worker.plan_driver import Driver, Job
from worker.tiny_model import load_tiny

from pagecast_kernels import configs
from pagecast_wire.codec import pack_u32
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import FLAG_BAD, FLAG_IDLE, FLAG_STOP
from pagecast_wire.sampling import SamplingParams
from pagecast_worker import torch_executor
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError, PlanError
from pagecast_worker.graphs import DecodeGraphs, buckets, sizes_of_sharing
from pagecast_worker.memory import GRAPH_LAYER_BYTES, SEGMENT_BYTES, graph_reserve, num_blocks_for
from pagecast_worker.results import join_steps
from pagecast_worker.steps import decode_step

NUM_BLOCKS = 60
GREEDY = SamplingParams(temperature=0.0)


class ReplayedHere(DecodeGraphs):
    """Graphs without CUDA: a replay computes the padded bucket again, into the same row buffer."""

    def _replay(self, size, shares):
        return self._run(size, shares)


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), NUM_BLOCKS)


def driver_of(executor):
    return Driver(executor, NUM_BLOCKS, max_num_seqs=8, max_model_len=128)


def jobs_of(count, output=9, sampling=GREEDY):
    return [Job([(7 * i + 11 * n) % 500 + 3 for i in range(6 + 9 * n)], output + n, sampling) for n in range(count)]


def run(executor, jobs, num_steps=1):
    driver = driver_of(executor)
    for job in jobs:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    while not all(job.done for job in jobs):
        driver.plan(num_steps)
    return [job.output for job in jobs]


@pytest.mark.parametrize("num_parameters", [10**8, 10**10])
@pytest.mark.parametrize("max_num_seqs", [1, 6, 24, 64, 200, 256, 300])
def test_buckets_hold_every_batch(max_num_seqs, num_parameters):
    sizes = buckets(max_num_seqs, num_parameters)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs and min(sizes) == 1


def test_buckets_are_as_fine_as_rows_are_dear():
    assert buckets(24, 10**10) == [1, 2, 4, 8, 16, 24]
    large = buckets(1024, 10**10)
    assert large[large.index(64) :] == [*range(64, 256, 8), *range(256, 1025, 32)]
    small = buckets(256, 10**8)
    assert small[small.index(64) :] == [*range(64, 257, 32)]
    assert sizes_of_sharing(buckets(200, 10**10)) == [64, 128, 192, 200]
    assert sizes_of_sharing(buckets(24, 10**10)) == []


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.7, top_p=0.8, seed=5)])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_padded_buckets_compute_the_same(executor, monkeypatch, sampling, num_steps):
    expected = run(executor, jobs_of(5, sampling=sampling))
    graphs = ReplayedHere(partial(decode_step, executor), [1, 2, 4, 8], executor.state.padding, torch.device("cpu"))
    monkeypatch.setattr(executor, "_graphs", graphs)
    with torch.inference_mode():
        assert run(executor, jobs_of(5, sampling=sampling), num_steps) == expected


def test_company_and_preemption_do_not_change_a_random_row(executor):
    sampling = SamplingParams(temperature=1.0, seed=1 << 63 | 12345)
    alone = run(executor, jobs_of(1, 12, sampling))[0]
    driver = driver_of(executor)
    jobs = jobs_of(4, 12, sampling)
    for job in reversed(jobs):
        driver.admit(job)
        driver.chunk(job)
    for _ in range(5):
        driver.plan()
    driver.release(jobs[0])
    driver.plan()
    driver.admit(jobs[0])
    driver.chunk(jobs[0])
    driver.plan()
    driver.finish()
    assert jobs[0].output == alone


def test_seeds_and_block_tables_arrive_as_they_were_sent(executor):
    seeds = [0, 1, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1]
    driver, jobs = driver_of(executor), jobs_of(6)
    for job, seed in zip(jobs, seeds, strict=True):
        job.sampling = SamplingParams(temperature=1.0, seed=seed)
        driver.admit(job)
        driver.chunk(job)
    for _ in range(9):  # on the way most rows grow by a block
        driver.plan()
        rows = [job.row for job in jobs]
        assert np.array_equal(executor.state.table[rows].numpy(), executor._book.table[rows])
    assert [seed % (1 << 64) for seed in executor.state.seeds[rows].tolist()] == seeds


def test_stop_id_ends_a_row_but_not_before_min_tokens(executor):
    plain = run(executor, jobs_of(1, 12))[0]
    stop = plain[4]
    job = Job(jobs_of(1)[0].prompt, 12, GREEDY, stop_token_ids=[500, stop])
    assert run(executor, [job]) == [plain[: plain.index(stop) + 1]]
    assert job.flags[-1] & FLAG_STOP
    late = Job(jobs_of(1)[0].prompt, 12, GREEDY, stop_token_ids=[stop], min_output=10)
    output = run(executor, [late])[0]
    assert stop not in output[:10] and len(output) >= 10


def test_copied_blocks_hold_what_the_source_held(executor):
    expected = run(executor, [Job(list(range(10, 42)), 6)])[0]
    driver = driver_of(executor)
    first = Job(list(range(10, 42)), 6)
    driver.admit(first)
    driver.chunk(first, 16)
    driver.plan()
    target = driver.free.pop()
    executor.submit(StepPlan(driver.epoch, driver.step + 1, copy_from=pack_u32(first.blocks[:1]), copy_to=pack_u32([target])))
    driver.step += 1
    assert executor.collect(wait=True).tokens == b""
    driver.release(first)
    second = Job(first.prompt, 6)
    driver.admit(second, shared=[target])
    driver.chunk(second)
    driver.plan()
    driver.finish()
    assert second.output == expected


@torch.inference_mode()
def test_row_that_is_not_a_number_is_flagged_and_leaves_nothing_behind(executor):
    expected = run(executor, jobs_of(2))
    weight = executor.model.layers[0].attention.qkv.weight
    saved = weight.clone()
    weight.fill_(float("nan"))
    bad = jobs_of(2, 1)
    driver = driver_of(executor)
    for job in bad:
        driver.admit(job)
        driver.chunk(job)
    driver.plan()
    weight.copy_(saved)
    assert [job.flags for job in bad] == [[FLAG_BAD], [FLAG_BAD]]
    assert run(executor, jobs_of(2)) == expected


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"released": pack_u32([3])}, "a released row is empty"),
        ({"released": pack_u32([99])}, "row number"),
        ({"grown_rows": pack_u32([0]), "grown_blocks": pack_u32([5])}, "a row that grows"),
        ({"copy_from": pack_u32([NUM_BLOCKS]), "copy_to": pack_u32([1])}, "block id"),
        ({"chunk_rows": pack_u32([0]), "chunk_starts": pack_u32([0]), "chunk_lengths": pack_u32([4])}, "beyond its row's known tokens"),
    ],
)
def test_plan_that_contradicts_the_rows_is_refused(executor, columns, named):
    driver_of(executor)
    with pytest.raises(PlanError, match=named):
        executor.submit(StepPlan(1, 1, **columns))


def test_epoch_larger_than_the_pool_is_refused(executor):
    with pytest.raises(PlanError, match="num_blocks must be at most"):
        executor.start_epoch(StartEpoch(1, NUM_BLOCKS + 1, 16, 8, 128, 2048))


def test_steps_are_joined_with_idle_rows():
    first = np.array([[10, 20, 30], [0, FLAG_STOP, 0]], dtype=np.int32)
    second = np.array([[11, 21], [0, 0]], dtype=np.int32)
    tokens, flags = join_steps([first, second], [np.array([1, 4, 6]), np.array([1, 4])])
    assert tokens.tolist()[0] == [10, 20, 30] and tokens[1, 0] == 11
    assert flags.tolist() == [[0, FLAG_STOP, 0], [0, FLAG_IDLE, FLAG_IDLE]]


def test_a_kernel_that_the_device_cannot_run_is_named_while_loading(tmp_path, monkeypatch):
    """Latent attention over float32 on a GPU with little shared memory."""
    monkeypatch.setattr(configs, "arch", lambda device: 89)
    monkeypatch.setattr(torch_executor, "peak_step", lambda executor: configs.latent_prefill(executor.device, 4))
    with pytest.raises(LoadError, match="needs 100 KiB of shared memory a program, this GPU has 99: use 16 bits"):
        load_tiny(tmp_path, NUM_BLOCKS)


def test_the_pool_is_what_a_step_and_graphs_leave_of_the_share(executor, monkeypatch):
    """Of 1,000 blocks of a GPU 900 may be used; 300 are in use, 20 of them nobody's but the allocator's; a step takes 50."""
    block = 1 << 20
    answers = {
        "mem_get_info": (700 * block, 1000 * block), "memory_allocated": 240 * block, "max_memory_allocated": 290 * block,
        "memory_reserved": 260 * block, "empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(executor.backend, "use_graphs", True)
    steps, gpu = [], torch.device("cuda")
    with torch.inference_mode():
        reserve = graph_reserve(executor)
    graphs = 4 + len(executor.graph_sizes()[1])
    assert reserve == 50 * block + SEGMENT_BYTES + graphs * 2 * GRAPH_LAYER_BYTES
    config = WorkerConfig(run_dir="/unused", model="m", gpu_memory_utilization=0.9)
    assert num_blocks_for(config, gpu, block, lambda: steps.append(1), {"of_rules": 30 * block, "for_graphs": 100 * block}) == 440
    assert steps == [1]
    with pytest.raises(LoadError, match="leaves no room for KV blocks: 280 MiB are in use and a step takes 50 MiB"):
        num_blocks_for(config, gpu, block, lambda: None, {"for_graphs": 569 * block})


@pytest.mark.parametrize("given", [{"cpu_kv_gib": 100_000.0}, {"num_blocks": 60_000_000}])
def test_a_pool_larger_than_the_machine_is_refused_by_its_option(given) -> None:
    config = WorkerConfig(run_dir="/unused", model="m", **given)
    with pytest.raises(LoadError, match=f"^{next(iter(given))} .* takes .* GiB, and this machine has"):
        num_blocks_for(config, torch.device("cpu"), 1 << 20, lambda: None, {})
