"""Of tokens whose hidden states nobody wants the last layer computes nothing but its cache: what is wanted stays as it was."""

import dataclasses

import pytest
import torch
from worker.family_model import NUM_BLOCKS, PROMPT, executor_for, write_family
from worker.hidden_states import all_hidden_states
from worker.plan_driver import Driver, Job

from pagecast_wire.sampling import SamplingParams

FAMILIES = ["LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"]


def driver_of(executor, **limits):
    return Driver(executor, NUM_BLOCKS, max_num_seqs=4, max_model_len=96, **limits)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in FAMILIES), ("LlamaForCausalLM", {"quantization": "int4"})])
def test_what_is_wanted_is_what_all_would_have_been(tmp_path, name, options):
    executor = executor_for(write_family(name, tmp_path, hidden_size=128)[0], **options)
    forward, told = executor.model.forward, []

    def both(ops, step, caches):
        some = forward(ops, step, caches)
        if step.wanted is not None:
            told.append((step.token_ids.shape[0], some, forward(ops, dataclasses.replace(step, wanted=None), caches)[step.wanted]))
        return some

    executor.model.forward = both
    driver, jobs = driver_of(executor), [Job(PROMPT[:20], 3), Job(PROMPT[:33], 3), Job(PROMPT[5:9], 3)]
    driver.admit(jobs[0])
    driver.chunk(jobs[0])
    driver.plan()
    driver.admit(jobs[1])
    driver.chunk(jobs[1], 30)
    driver.plan()  # one decodes, and a chunk after which nothing is drawn
    driver.admit(jobs[2])
    driver.chunk(jobs[1])
    driver.chunk(jobs[2])
    driver.finish()
    assert [(tokens, len(some)) for tokens, some, _ in told] == [(20, 1), (31, 1), (8, 3)]
    for _, some, all_wanted in told:
        torch.testing.assert_close(some, all_wanted, rtol=1e-4, atol=1e-4)


def test_a_chunk_after_which_nobody_draws_and_log_probabilities_of_a_prompt(tmp_path):
    executor = executor_for(write_family("LlamaForCausalLM", tmp_path)[0])
    plain, driver = Job(PROMPT[:40], 4), driver_of(executor)
    driver.admit(plain)
    driver.chunk(plain)
    driver.finish()
    driver, told = driver_of(executor), Job(PROMPT[:40], 4, SamplingParams(temperature=0.0, num_prompt_logprobs=1))
    jobs = [Job(PROMPT[:40], 4), told]
    with all_hidden_states(executor) as seen:
        driver.admit(jobs[0])
        driver.chunk(jobs[0], 17)
        driver.plan()  # nobody draws
        driver.chunk(jobs[0])
        driver.admit(told)
        driver.chunk(told)
        driver.finish()
    assert [len(states) for states in seen[:2]] == [17, 63]
    assert jobs[0].output == told.output == plain.output
