"""GGUF files: names, permuted rows, every type that can be de-quantized, and broken files."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from worker.family_model import PROMPT, Forward, executor_for, expected_logits, write_family
from worker.gguf_model import permuted, write, write_family_gguf
from worker.smollm2 import model_file
from worker.tiny_model import weights
from worker.two_ranks import logits_of_two

from pagecast_wire.gguf_metadata import read_head
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.gguf import GgufCheckpoint, huggingface_name, unpermute
from pagecast_worker.loading.gguf_tensors import stored_tensors
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


def known_kinds():
    """Types that llama.cpp alone writes."""
    named = lambda name: name[:2] in ("Q2", "Q3", "Q6", "TQ", "IQ", "MX") or name in ("Q4_K", "Q5_K")
    return [kind for kind in gguf.GGMLQuantizationType if named(kind.name)]


def test_types_that_only_llama_cpp_writes_are_read_as_its_library_reads_them(tmp_path):
    """Of any bytes: blocks of 256 with scales of their own, three values, code books."""
    generator = np.random.default_rng(1)
    kinds = known_kinds()
    size = lambda kind: gguf.quants.quant_shape_to_byte_shape((3, 512), kind)
    others = {kind: generator.integers(0, 256, size(kind), np.uint8) for kind in kinds}
    checkpoint = GgufCheckpoint(write(tmp_path / "tiny.gguf", others=others))
    assert len(others) >= 16
    for kind, data in others.items():
        with np.errstate(all="ignore"):
            want = torch.from_numpy(gguf.quants.dequantize(data, kind))
            found = checkpoint.raw(f"other.{kind.name}")
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        assert want.shape == (3, 512)


def test_tensors_are_found_where_the_packages_own_reader_finds_them(tmp_path):
    """Which takes two seconds for the vocabulary of a small model: the worker does without it."""
    others = {kind: np.full(gguf.quants.quant_shape_to_byte_shape((3, 512), kind), 7, np.uint8) for kind in known_kinds()}
    path = write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0, others=others)
    for aligned in (path, realigned(path, tmp_path / "aligned.gguf")):
        reader = gguf.GGUFReader(aligned)
        values, entries = read_head(aligned)
        assert values["general.architecture"] == "llama" and len(entries) == len(reader.tensors) > 30
        for found, want in zip(stored_tensors(aligned, entries), reader.tensors, strict=True):
            assert (found.name, found.kind, list(found.dims)) == (want.name, want.tensor_type, want.shape.tolist())
            assert found.data.dtype == want.data.dtype and np.array_equal(found.data, want.data)


def realigned(path, to):
    """The same tensors at multiples of 256 bytes."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(to, "llama")
    writer.add_custom_alignment(256)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_the_worker_never_makes_the_packages_own_reader(tmp_path, monkeypatch):
    path = write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", None)
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.identity() and set(checkpoint.names()) == set(weights())


def test_a_file_that_ends_within_its_head_or_its_tensors_is_refused_in_one_line(tmp_path):
    path, cut = write(tmp_path / "tiny.gguf"), tmp_path / "cut.gguf"
    whole = path.read_bytes()
    _, entries = read_head(path)
    head = min(entry.start for entry in entries)
    for keep in (*range(4, head, 7), *(entry.start for entry in entries), len(whole) - 33):
        cut.write_bytes(whole[:keep])
        with pytest.raises(LoadError, match=r"cut\.gguf: (not a readable GGUF file \(.*\)|field general.architecture is missing)$"):
            GgufCheckpoint(cut)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((lambda at, data: data.replace(b"output_norm.weight", b"outpux_norm.weight")), "tensor model.norm.weight is missing"),
        ((lambda at, data: data[:at] + b"\xee\0\0\0" + data[at + 4 :]), "tensor output.weight is of type 238, which is unknown"),
        ((lambda at, data: data[: at - 20] + b"\x09" + data[at - 19 :]), "output.weight has 9 dimensions, at most 4"),
        ((lambda at, data: data[: at - 16] + b"\x21" + data[at - 15 :]), "output.weight has rows of 33 values, Q4_0 has blocks of 32"),
        ((lambda at, data: data[: at + 4] + b"\xff" * 7 + data[at + 11 :]), "tensor output.weight runs past its end"),
        ((lambda at, data: data.replace(b"blk.0.attn_k", b"blk.0.attn_q")), "two tensors have one name"),
    ],
)
def test_a_head_that_lies_is_refused_by_what_it_says(tmp_path, change, said):
    path = write(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_0)
    data = path.read_bytes()
    at = data.index(b"output.weight") + len("output.weight") + 4 + 16  # behind its dimensions
    path.write_bytes(change(at, data))
    with pytest.raises(LoadError) as caught:
        GgufCheckpoint(path).tensor("model.norm.weight", (128,))
    assert said in str(caught.value)


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
    names = architectures()["MixtralForCausalLM"].names
    experts = "model.layers.1.block_sparse_moe.experts"
    assert huggingface_name("blk.1.ffn_down_exps.weight", names) == f"{experts}.{{e}}.w2.weight"
    assert huggingface_name("blk.1.ffn_up.7.weight", names) == f"{experts}.7.w3.weight"


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


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
GGUF_FAMILIES = sorted(name for name, family in architectures().items() if family.gguf)


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_family_from_a_gguf_file_computes_what_transformers_computes(tmp_path, name):
    """Examples without what a .gguf file does not hold: scaled rotation, and windows where llama.cpp knows none."""
    plain = {"rope_parameters": PLAIN_ROPE, "max_position_embeddings": 128}
    plain |= {"use_sliding_window": False} if name == "Qwen2ForCausalLM" else {}
    plain |= {"query_pre_attn_scalar": 16} if name.startswith("Gemma") else {}
    plain |= {"mlp_only_layers": []} if name == "Qwen3MoeForCausalLM" else {}
    if name == "Gemma3ForCausalLM":
        plain["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
        plain |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    folder, model = write_family(name, tmp_path / "folder", **plain)
    path = tmp_path / "model.gguf"
    write_family_gguf(path, name, model.config, load_file(folder / "model.safetensors"))
    ids, logits = expected_logits(model, PROMPT, 2)
    executor = executor_for(path)
    assert executor.facts.architecture == name
    forward = Forward(executor)
    got = torch.cat([forward.chunk(PROMPT), forward.decode(ids[-2]), forward.decode(ids[-1])])
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)
    whole = Forward(executor_for(folder)).chunk(PROMPT)
    torch.testing.assert_close(got[: len(PROMPT)], whole, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """Configuration and tensors of a small Mixtral."""
    folder, model = write_family("MixtralForCausalLM", tmp_path_factory.mktemp("mixtral"), rope_parameters=PLAIN_ROPE)
    return model.config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("kind", "error"), [("BF16", 5e-3), ("Q8_0", 6e-3), ("Q4_1", 0.1)])
def test_stacked_experts_are_taken_apart_as_they_are_stored(tmp_path, mixtral, kind, error):
    path = tmp_path / "model.gguf"
    write_family_gguf(path, "MixtralForCausalLM", *mixtral, kind=gguf.GGMLQuantizationType[kind])
    checkpoint = GgufCheckpoint(path)
    assert set(checkpoint.names()) == set(mixtral[1])
    assert checkpoint.config.quantization == ("" if kind == "BF16" else kind)
    for name, tensor in mixtral[1].items():
        if ".experts." in name:
            found = checkpoint.tensor(name, tuple(tensor.shape)).float()
            torch.testing.assert_close(found, tensor, rtol=0, atol=error)


@pytest.mark.parametrize("split", [False, True], ids=["one tensor for all", "a tensor for each"])
def test_experts_of_a_gguf_file_over_two_ranks(tmp_path, mixtral, split):
    path = tmp_path / "model.gguf"
    write_family_gguf(path, "MixtralForCausalLM", *mixtral, split=split)
    want = Forward(executor_for(path)).chunk(PROMPT)
    for got in logits_of_two(path):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}, r"field llama\.expert_gating_func must be 1, got 2"),
        ({"expert_shared_count": 1}, r"field llama\.expert_shared_count must be 0, got 1"),
        ({"expert_used_count": 5}, r"field llama\.expert_used_count must be 1 to 4, got 5"),
        ({"expert_count": 5}, r"tensor model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight is missing"),
        ({"architecture": "qwen3"}, r"field qwen3\.expert_count is 4, and qwen3 is known without experts"),
        ({"architecture": "qwen3moe", "expert_count": 0}, r"field qwen3moe\.expert_count is 0, and qwen3moe is known with experts"),
    ],
)  # fmt: skip
def test_experts_that_are_not_computed_are_refused_by_name(tmp_path, mixtral, fields, said):
    path = tmp_path / "model.gguf"
    write_family_gguf(path, "MixtralForCausalLM", *mixtral, **fields)
    with pytest.raises(LoadError, match=said):
        executor_for(path)
