"""Files of other tools; splits over ranks; weights rounded on the way in."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker.family_model import PROMPT, Forward, executor_for, write_family
from worker.quantized_files import FORMATS, SIZES, write_quantized

from pagecast_kernels.quantized_weights import round_to_nearest
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading import stored
from pagecast_worker.loading.load import load_model, open_checkpoint
from pagecast_worker.loading.schemes import Scheme, read_scheme
from pagecast_worker.parallel import Part, Ranks


@pytest.mark.parametrize("name", FORMATS)
def test_formats_mean_what_they_should(name, tmp_path):
    folder, source = write_quantized(tmp_path, *FORMATS[name])
    executor = executor_for(folder)
    got, want = Forward(executor).chunk(PROMPT), Forward(executor_for(source)).chunk(PROMPT)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert executor.facts.quantization == executor.model.config.quantization != ""


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["gptq int4"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    save_file({key: value for key, value in tensors.items() if key != f"{name}.scales"}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=rf"tensor {name}.scales is missing"):
        executor_for(folder)
    save_file(tensors | {f"{name}.scales": tensors[f"{name}.scales"][:1].clone()}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=rf"tensor {name}.scales is \[1, 128\] of float16, must be \[4, 128\]"):
        executor_for(folder)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_method": "exl2"}, "quant_method"), ({"quant_method": "awq", "version": "gemv", "bits": 4}, "version"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}}, "num_bits"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(config, field, tmp_path):
    with pytest.raises(LoadError, match=rf"quantization_config\.(config_groups\.a\.weights\.)?{field} must"):
        read_scheme(tmp_path / "config.json", config)


def test_splits_take_whole_groups_or_are_refused_by_name():
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    values, scales, zeros = round_to_nearest(weight, 64, False, 4)
    whole = stored.Stored("int4", values, scales, zeros, 64, None, "model.layers.0.mlp.down_proj")
    dense = whole.dense(torch.float32)
    for part in (Part(1, 128, 256), Part(1, 64, 128), Part(0, 8, 16)):
        assert torch.equal(whole.part(part).dense(torch.float32), part.of(dense))
    for part in (Part(1, 0, 32), Part(1, 96, 192)):  # halves of groups are groups of their own
        assert torch.equal(whole.part(part).dense(torch.float32), part.of(dense)) and whole.part(part).group == 32
    with pytest.raises(LoadError, match=r"whole groups of 64 columns, .* of model.layers.0.mlp.down_proj, got 48 columns"):
        whole.part(Part(1, 0, 48))
    ordered = stored.Stored("int4", values, scales, zeros, 64, torch.randperm(256), "model.layers.0.mlp.down_proj")
    assert torch.equal(ordered.part(Part(0, 8, 16)).dense(torch.float32), ordered.dense(torch.float32)[8:])
    with pytest.raises(LoadError, match=r"tensor_parallel_size must be 1: the columns of model.layers.0.mlp.down_proj"):
        ordered.part(Part(1, 0, 128))


def load_rank(folder, rank: int, size: int, **options):
    """One rank's model, without the others."""
    config = WorkerConfig(run_dir="/unused", model=str(folder), rank=rank, tensor_parallel_size=size, device="cpu", **options)
    device = torch.device("cpu")
    return load_model(config, open_checkpoint(config, device), Ranks(rank, size), device, torch.float32, lambda progress: None).model


@pytest.mark.parametrize("name", ["awq", "gptq int8", "fp8 blocks"])
def test_every_rank_holds_its_part_of_a_quantized_checkpoint(name, tmp_path):
    folder, source = write_quantized(tmp_path, *FORMATS[name])
    for rank in range(2):
        for own, want in zip(load_rank(folder, rank, 2).layers, load_rank(source, rank, 2).layers, strict=True):
            for pick in (
                lambda layer: layer.attention.qkv, lambda layer: layer.attention.output, lambda layer: layer.feed_forward.gate_up,
                lambda layer: layer.feed_forward.down,
            ):
                torch.testing.assert_close(pick(own).weight, pick(want).weight, rtol=0, atol=1e-6)


def test_a_split_through_a_group_is_refused_by_name(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["gptq int4"], head_dim=24)
    with pytest.raises(LoadError, match=r"groups of 64 columns, or .* of model.layers.0.self_attn.o_proj, got 48 columns"):
        load_rank(folder, 1, 2)


def test_columns_ordered_by_activation_are_not_split(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["gptq act-order"])
    with pytest.raises(LoadError, match=r"tensor_parallel_size must be 1: the columns of model.layers.0.self_attn.o_proj"):
        load_rank(folder, 0, 2)


@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_weights_rounded_while_they_load(method, tmp_path):
    folder, model = write_family("Qwen2ForCausalLM", tmp_path / "plain", **SIZES)
    executor = executor_for(folder, quantization=method)
    assert executor.facts.quantization == method
    assert executor.facts.digest != executor_for(folder).facts.digest
    assert executor.facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for layer, theirs in zip(executor.model.layers, model.model.layers, strict=True):
        pairs = ((layer.attention.output, theirs.self_attn.o_proj.weight), (layer.feed_forward.down, theirs.mlp.down_proj.weight))
        for own, weight in pairs:
            if method == "fp8" and own is executor.model.layers[-1].feed_forward.down:
                assert torch.equal(own.weight, weight)
                continue
            kept = own.weight.weight if method == "fp8" else own.weight
            weight = weight.detach()
            assert 0.001 < float((kept - weight).norm() / weight.norm()) < (0.04 if method == "fp8" else 0.15)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name:
                parameter.copy_(stored.rounded(parameter, method, 128, name).dense(torch.float32))
            elif "lm_head" in name and method == "int4":
                parameter.copy_(stored.rounded(parameter, "int8", 0, name).dense(torch.float32))
        want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = Forward(executor).chunk(PROMPT)
    if method == "int4":
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    else:  # activations are rounded too
        assert 0.001 < float((got - want).norm() / want.norm()) < 0.5


def test_an_output_head_is_rounded_to_int8_by_row_beside_layers_of_int4(tmp_path):
    folder, model = write_family("LlamaForCausalLM", tmp_path / "own", **SIZES)
    weight = model.lm_head.weight.detach()
    error = lambda head: (head - weight).abs() / weight.abs().amax(1, keepdim=True)
    head = executor_for(folder, quantization="int4").model.head.weight
    assert 0.0 < float(error(head).max()) <= 1.01 / 255  # half a step of a row's, or a whole one of its largest value
    assert torch.equal(executor_for(folder, quantization="fp8").model.head.weight, weight)
    halves = [load_rank(folder, rank, 2, quantization="int4") for rank in range(2)]
    assert torch.equal(torch.cat([half.head.weight for half in halves]), head)
    tied, model = write_family("LlamaForCausalLM", tmp_path / "tied", tie_word_embeddings=True, **SIZES)
    alone = executor_for(tied, quantization="int4").model
    assert alone.head.weight is alone.embedding.weight and torch.equal(alone.head.weight, model.lm_head.weight)


def test_quantizing_twice_is_refused(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["gptq int4"])
    with pytest.raises(LoadError, match=r"quantization must not be given for a checkpoint that is quantized \(GPTQ-int4\), got fp8"):
        executor_for(folder, quantization="fp8")


def test_cache_of_eight_bits_with_stored_scales(tmp_path):
    folder, _ = write_family("LlamaForCausalLM", tmp_path, **SIZES)
    plain = executor_for(folder)
    want = Forward(plain).chunk(PROMPT)
    executor = executor_for(folder, kv_cache_dtype="fp8")
    error = float((Forward(executor).chunk(PROMPT) - want).norm() / want.norm())
    assert 0.001 < error < 0.25
    assert executor.facts.kv_bytes_per_token * 4 == plain.facts.kv_bytes_per_token
    tensors = load_file(folder / "model.safetensors")
    heads = executor.model.num_kv_heads
    own = {f"model.layers.{i}.self_attn.{part}_scale": torch.full((heads,), 0.05) for i in range(2) for part in "kv"}
    save_file(tensors | own, folder / "model.safetensors")
    scaled = executor_for(folder, kv_cache_dtype="fp8")
    assert scaled.model.layers[1].attention.kv_scales["k_scale"].tolist() == pytest.approx([0.05] * heads)
    assert float((Forward(scaled).chunk(PROMPT) - want).norm() / want.norm()) < 0.25
    forward = Forward(scaled)
    parts = [forward.chunk(PROMPT[:40]), *(forward.decode(token) for token in PROMPT[40:])]
    assert float((torch.cat(parts) - want).norm() / want.norm()) < 0.25
    save_file(tensors | own | {"model.layers.0.self_attn.k_scale": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"model.layers.0.self_attn.k_scale must hold 1 or"):
        executor_for(folder, kv_cache_dtype="fp8")


def test_scheme_names():
    assert read_scheme(None, None) is None
    assert read_scheme(None, FORMATS["gptq int8"][0]) == Scheme("gptq", 8, 128, "GPTQ-int8", plus_one=True)
