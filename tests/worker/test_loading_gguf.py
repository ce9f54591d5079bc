"""GGUF files: names, permuted rows, every type that can be de-quantized, and broken files."""

import gguf
import pytest
import torch
from worker.family_model import PROMPT, Forward, executor_for, expected_logits, write_family
from worker.gguf_model import permuted, write
from worker.smollm2 import model_file
from worker.tiny_model import weights

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.gguf import GgufCheckpoint, huggingface_name, unpermute
from pagecast_worker.models.registry import architectures


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_stored_type_comes_back(tmp_path, kind):
    checkpoint = GgufCheckpoint(write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind]))
    assert set(checkpoint.names()) == set(weights())
    error = {"F32": 0, "F16": 1e-3, "BF16": 1e-6, "Q8_0": 0.01}.get(kind, 0.15)
    for name, tensor in weights().items():
        if not name.endswith("v_proj.weight"):
            found = checkpoint.tensor(name, tuple(tensor.shape)).float()
            torch.testing.assert_close(found, tensor.float(), rtol=0, atol=error)
    assert checkpoint.config.quantization == ("" if kind in ("F32", "F16", "BF16") else kind)


def test_configuration_comes_from_the_metadata(tmp_path):
    config = GgufCheckpoint(write(tmp_path / "tiny.gguf")).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 32, 512)
    assert (config.rope_theta, config.eos_token_ids, config.tie_word_embeddings) == (20000.0, (2, 4), False)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    tied = GgufCheckpoint(write(tmp_path / "tied.gguf", leave_out=("lm_head.weight",))).config
    assert tied.tie_word_embeddings


def test_real_file_says_what_it_is():
    config = GgufCheckpoint(model_file()).config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.rope_theta, config.tie_word_embeddings, config.eos_token_ids) == (100000.0, True, (2,))
    assert config.quantization == "Q4_1+Q8_0"


def test_unpermute_is_the_inverse():
    weight = torch.arange(24 * 3).view(24, 3)
    assert torch.equal(unpermute(permuted(weight, 2), 2), weight)


def test_names():
    assert huggingface_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert huggingface_name("something.else") == "something.else"


@pytest.mark.parametrize("keep", [0, 3, 40, 5000])
def test_truncated_file_is_refused_by_name(tmp_path, keep):
    path = write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"tiny\.gguf: "):
        checkpoint = GgufCheckpoint(path)
        for name in checkpoint.names():
            checkpoint.tensor(name, tuple(weights()[name].shape))


def test_unknown_architecture(tmp_path):
    with pytest.raises(LoadError, match=r"field general\.architecture is 'mamba'"):
        GgufCheckpoint(write(tmp_path / "tiny.gguf", architecture="mamba"))


def test_wrong_shape(tmp_path):
    checkpoint = GgufCheckpoint(write(tmp_path / "tiny.gguf"))
    with pytest.raises(LoadError, match=r"tensor model\.norm\.weight has shape \[128\], the configuration asks for \[7\]"):
        checkpoint.tensor("model.norm.weight", (7,))


GGUF_FAMILIES = sorted(name for name, family in architectures().items() if family.gguf)


def write_family_gguf(path, name, config, state):
    """A family's checkpoint as a .gguf file in float32, with the names that the gguf library itself gives its tensors."""
    family = architectures()[name]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.gguf.upper()), config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, family.gguf)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma3 = family.gguf == "gemma3"
    writer.add_rope_freq_base((config.rope_parameters["full_attention"] if gemma3 else config.rope_parameters)["rope_theta"])
    if family.gguf.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family.gguf == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, tensor in state.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if family.gguf == "llama" and part in key:
                tensor = permuted(tensor, heads)
        tensor = tensor + 1 if family.gguf.startswith("gemma") and "norm" in key else tensor
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_family_from_a_gguf_file_computes_what_transformers_computes(tmp_path, name):
    """Examples without what a .gguf file does not hold: scaled rotation, and windows where llama.cpp knows none."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "max_position_embeddings": 128}
    plain |= {"use_sliding_window": False} if name == "Qwen2ForCausalLM" else {}
    plain |= {"query_pre_attn_scalar": 16} if name.startswith("Gemma") else {}
    if name == "Gemma3ForCausalLM":
        plain["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
        plain |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    folder, model = write_family(name, tmp_path / "folder", **plain)
    path = tmp_path / "model.gguf"
    write_family_gguf(path, name, model.config, model.state_dict())
    ids, logits = expected_logits(model, PROMPT, 2)
    executor = executor_for(path)
    assert executor.facts.architecture == name
    forward = Forward(executor)
    got = torch.cat([forward.chunk(PROMPT), forward.decode(ids[-2]), forward.decode(ids[-1])])
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)
    whole = Forward(executor_for(folder)).chunk(PROMPT)
    torch.testing.assert_close(got[: len(PROMPT)], whole, rtol=0, atol=1e-5)
