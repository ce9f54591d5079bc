"""Norms folded into products: which models, and that they compute what they did, up to the rounding of bfloat16."""

import dataclasses
import os
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from worker.family_model import NUM_BLOCKS, PROMPT, executor_for, write_family
from worker.hidden_states import all_hidden_states
from worker.plan_driver import Driver, Job
from worker.smollm2 import first_difference, model_file, prompts

from pagecast_kernels import reference
from pagecast_worker.backend import cuda_operators, fold_norms
from pagecast_worker.config import WorkerConfig
from pagecast_worker.models import folded
from pagecast_worker.torch_executor import TorchExecutor

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
OTHERS = ("Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4ForCausalLM")


def made(folder, dtype="float32"):
    """An executor whose norms have weights that nobody could leave out, the same bits in every type."""
    executor, g = executor_for(folder, dtype=dtype), torch.Generator().manual_seed(4)
    with torch.inference_mode():
        for layer in executor.model.layers:
            for norm in (layer.attention_norm, layer.feed_forward_norm):
                norm.copy_((torch.rand(norm.shape, generator=g) * 4 + 0.2).bfloat16())
    return executor


def fold(executor):
    """Plain operators too, as those of the CPU backend have no sum with a product."""
    with torch.inference_mode():
        folded.fold(executor.model)
    executor.ops = SimpleNamespace(**vars(reference), one_row=False)


def states(executor, draws: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Hidden states in float64 of chunks alone and beside a decoding row, then of decoding rows, two and at last one; what was drawn."""
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4, max_model_len=96)
    jobs = [Job(PROMPT[:40], min(draws, 6)), Job(PROMPT[5:14], draws)]
    with all_hidden_states(executor) as seen:
        for job, size in zip(jobs, (25, 9), strict=True):
            driver.admit(job)
            driver.chunk(job, size)
            driver.plan()
            if job.computed < job.known:
                driver.chunk(job)
                driver.plan()
        driver.finish()
    return torch.cat(seen).double(), [job.output for job in jobs]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", PLAIN[:3])
def test_folded_computes_what_norms_apart_do(tmp_path, name):
    """In float32, where hardly anything is rounded: by plain operators, and by those of the GPU, which have one-row steps too."""
    executor = made(write_family(name, tmp_path, hidden_size=128)[0])
    want, drawn = states(executor, 9)
    fold(executor)
    for layer in executor.model.layers:
        assert layer.attention_norm.eq(1).all() and layer.feed_forward_norm.eq(1).all()
    by_kernels = cuda_operators(executor.config, executor.model, torch.device("cpu"))
    assert by_kernels.one_row
    plain = executor.ops
    for ops, whole in ((plain, True), (by_kernels, True), (plain, False)):  # at last norms of ones beside folded weights, the other way
        executor.ops, executor.model.folded = ops, whole
        got, outputs = states(executor, 9)
        assert outputs == drawn and error(got, want) < 1e-5


def test_the_last_layer_computes_what_is_wanted(tmp_path):
    executor = made(write_family("LlamaForCausalLM", tmp_path, hidden_size=128)[0])
    fold(executor)
    forward, told = executor.model.forward, []

    def both(ops, step, caches):
        some = forward(ops, step, caches)
        if step.wanted is not None:
            told.append((len(some), error(some, forward(ops, dataclasses.replace(step, wanted=None), caches)[step.wanted])))
        return some

    executor.model.forward = both
    driver = Driver(executor, NUM_BLOCKS, max_num_seqs=4, max_model_len=96)
    for job in (Job(PROMPT[:20], 3), Job(PROMPT[3:40], 3)):
        driver.admit(job)
        driver.chunk(job)
        driver.plan()
    driver.finish()
    assert [count for count, _ in told] == [1, 2] and max(wrong for _, wrong in told) < 1e-5


@pytest.mark.parametrize("name", PLAIN)
def test_in_bfloat16_folded_is_as_exact_as_norms_apart(tmp_path, name):
    folder = write_family(name, tmp_path, hidden_size=128)[0]
    exact, executor = states(made(folder), 1)[0], made(folder, "bfloat16")
    apart = error(states(executor, 1)[0], exact)
    fold(executor)
    assert apart < 0.15 and error(states(executor, 1)[0], exact) < 1.5 * apart


def test_the_real_model_draws_best_tokens_or_near_ties():
    config = WorkerConfig(run_dir="/unused", model=str(model_file()), device="cpu", dtype="bfloat16", num_blocks=40, max_num_seqs=2)
    executor = TorchExecutor(config)
    executor.load(lambda progress: None)
    assert folded.suits(executor.model)
    fold(executor)
    driver, job = Driver(executor, 40, max_num_seqs=2), Job(prompts()[0], 12)
    driver.admit(job)
    driver.chunk(job)
    driver.finish()
    assert first_difference(job.prompt, job.output, tie=0.5) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_need_their_norms_apart(tmp_path, name):
    assert not folded.suits(executor_for(write_family(name, tmp_path)[0], dtype="bfloat16").model)


def test_what_is_folded_when_serving(tmp_path):
    folder = write_family("LlamaForCausalLM", tmp_path, hidden_size=128)[0]
    for dtype, options, yes in (
        ("bfloat16", {}, True), ("float32", {}, False), ("float16", {}, False), ("bfloat16", {"fold_norms": False}, False),
        ("bfloat16", {"batch_invariant": True}, False), ("bfloat16", {"quantization": "fp8"}, False),
    ):  # fmt: skip
        executor = executor_for(folder, dtype=dtype, **{name: value for name, value in options.items() if name == "quantization"})
        with torch.inference_mode():
            fold_norms(dataclasses.replace(executor.config, **options), executor.model)
        assert executor.model.folded == yes, (dtype, options)
