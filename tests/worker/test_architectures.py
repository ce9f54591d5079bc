"""Every family in pagecast_worker/models beside transformers, on a small checkpoint that transformers makes: a new file is tested too.

Logits in float32: the whole prompt in one step, in chunks of 7 beside another sequence, and 20 decode steps. The prompt is longer
than every example's window and original rotary range.
"""

from dataclasses import replace

import pytest
import torch
from worker.family_model import PROMPT, Forward, executor_for, expected_logits, write_family

from pagecast_worker.models import llama
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.registry import architectures

CLOSE = 1e-4
DECODES = 20


@pytest.fixture(scope="module", params=sorted(architectures()))
def family(request, tmp_path_factory):
    """(executor, token ids of prompt and continuation, transformers' logits [T, V])."""
    folder, model = write_family(request.param, tmp_path_factory.mktemp("family"))
    ids, logits = expected_logits(model, PROMPT, DECODES)
    executor = executor_for(folder)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    text = [value for name, value in model.named_parameters() if "vision_tower" not in name and "projector" not in name]
    executor.reference_parameters = sum(value.numel() for value in [*text, *corrections])
    return executor, ids, logits


def test_whole_prompt_in_one_step(family):
    executor, ids, logits = family
    got = Forward(executor).chunk(ids[: len(PROMPT)])
    torch.testing.assert_close(got, logits[: len(PROMPT)], rtol=0, atol=CLOSE)


def test_chunks_of_seven_then_decode_steps(family):
    executor, ids, logits = family
    forward = Forward(executor)
    parts = [forward.chunk(ids[start : min(start + 7, len(PROMPT))]) for start in range(0, len(PROMPT), 7)]
    torch.testing.assert_close(torch.cat(parts), logits[: len(PROMPT)], rtol=0, atol=CLOSE)
    for position in range(len(PROMPT), len(PROMPT) + DECODES):
        got = forward.decode(ids[position])
        torch.testing.assert_close(got, logits[position : position + 1], rtol=0, atol=CLOSE)


def test_facts_name_the_family_and_count_its_parameters(family):
    executor, _, _ = family
    config = executor.model.config
    assert config.architecture in architectures()
    assert executor.facts.architecture == config.architecture
    assert executor.facts.num_parameters == executor.reference_parameters
    heads, key, value = config.kv_shape()
    assert executor.facts.kv_bytes_per_token == config.num_layers * heads * (key + value) * 4


def test_a_family_that_transformers_has_under_another_name(tmp_path, monkeypatch):
    atlas = Architecture("AtlasForCausalLM", "atlas", llama.read)
    monkeypatch.setitem(architectures(), atlas.name, atlas)
    with pytest.raises(AssertionError, match="has no AtlasForCausalLM: give ARCHITECTURE a reference"):
        write_family(atlas.name, tmp_path)
    monkeypatch.setitem(architectures(), atlas.name, replace(atlas, reference="LlamaForCausalLM"))
    folder, model = write_family(atlas.name, tmp_path)
    ids, logits = expected_logits(model, PROMPT, 0)
    executor = executor_for(folder)
    assert executor.facts.architecture == atlas.name
    torch.testing.assert_close(Forward(executor).chunk(ids), logits, rtol=0, atol=CLOSE)


SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e3},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e3},
    "yarn with its own factor": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 24, "attention_factor": 0.8,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn with two temperatures": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 24, "mscale": 0.7, "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 24, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_prompt_longer_than_the_original_rotary_range(tmp_path, kind):
    """Dynamic scaling depends on the longest sequence served, which for transformers is the one at hand: here they are the same."""
    positions = 96 if kind == "llama3" else 24
    folder, model = write_family("LlamaForCausalLM", tmp_path, max_position_embeddings=positions, rope_parameters=SCALINGS[kind])
    prompt = [(29 * i) % 150 + 3 for i in range(96)]
    ids, logits = expected_logits(model, prompt, 0)
    executor = executor_for(folder)
    assert executor.facts.max_model_len == 96
    torch.testing.assert_close(Forward(executor).chunk(ids), logits, rtol=0, atol=CLOSE)
