"""AWQ, GPTQ and FP8 files, packed here value by value as their formats say; splits over ranks; weights rounded on the way in."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker.family_model import PROMPT, Forward, executor_for, write_family

from pagecast_kernels.quantized_weights import round_to_nearest
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading import stored
from pagecast_worker.loading.load import load_model, open_checkpoint
from pagecast_worker.loading.schemes import Scheme, read_scheme
from pagecast_worker.parallel import Part, Ranks

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def words(table: list[list[int]], bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Rows of small integers as rows of int32 words, the lowest bits first; order: which value of a word's comes at each place."""
    per = 32 // bits
    order = order or list(range(per))
    return torch.tensor(
        [[signed(sum(row[at + order[i]] << bits * i for i in range(per))) for at in range(0, len(row), per)] for row in table],
        dtype=torch.int32,
    )


def awq(weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """AWQ tensors of a weight [N, K], and the weight that they mean."""
    values, scales, zeros = round_to_nearest(weight, group, False, 4)
    scales = scales.half()
    spread = lambda x: x.repeat_interleave(group, 1)
    tensors = {
        "qweight": words(values.t().tolist(), 4, AWQ_ORDER), "qzeros": words(zeros.int().t().tolist(), 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }  # fmt: skip
    return tensors, (values.float() - spread(zeros)) * spread(scales.float())


def gptq(weight: torch.Tensor, group: int, bits: int, order: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """GPTQ tensors. order: columns by importance, the first `group` of which share the first scale."""
    columns = weight.shape[1]
    order = torch.arange(columns) if order is None else order
    index = torch.empty(columns, dtype=torch.int64)
    index[order] = torch.arange(columns) // group
    values, scales, zeros = round_to_nearest(weight[:, order], group, False, bits)
    zeros = zeros.clamp(min=1)
    values, scales = values[:, order.argsort()], scales.half()
    tensors = {
        "qweight": words(values.tolist(), bits).t().contiguous(), "qzeros": words((zeros.int() - 1).t().tolist(), bits),
        "scales": scales.t().contiguous(), "g_idx": index.int(),
    }  # fmt: skip
    return tensors, (values.float() - zeros[:, index]) * scales.float()[:, index]


def fp8_block(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks of 128 x 128 that share a scale, the last ones smaller."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    values, meant = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            values.view(torch.uint8)[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn).view(torch.uint8)
            meant[block] = values[block].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, meant


FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, lambda w: awq(w, 32)),
    "gptq int4": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, lambda w: gptq(w, 64, 4, None)),
    "gptq int8": ({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}, lambda w: gptq(w, 128, 8, None)),
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w: gptq(w, 32, 4, torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(w.shape[1]))),
    ),
    "gptq orders that differ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w: gptq(w, 32, 4, torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(int(w.abs().sum())))),
    ),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, fp8_block),
}  # fmt: skip


def write_quantized(folder, config, make):
    """A checkpoint with every projection made by `make`, and one with the weights that it means, as transformers would load it."""
    source, _ = write_family("LlamaForCausalLM", folder / "plain", **SIZES)
    values = json.loads((source / "config.json").read_text())
    tensors, quantized = load_file(source / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if "_proj.weight" not in name:
            quantized[name] = weight
            continue
        parts, tensors[name] = make(weight)
        quantized |= {name.removesuffix("weight") + ending: value.contiguous() for ending, value in parts.items()}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    save_file(quantized, folder / "model.safetensors")
    save_file(tensors, source / "model.safetensors")
    return folder, source


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
    with pytest.raises(LoadError, match=r"whole groups of 64 columns of model.layers.0.mlp.down_proj, got 32"):
        whole.part(Part(1, 0, 32))
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
    if name == "gptq int8":  # groups of 128 do not end where the 128 columns of o are cut in two
        with pytest.raises(LoadError, match=r"whole groups of 128 columns of model.layers.0.self_attn.o_proj, got 64"):
            load_rank(folder, 0, 2)
        return
    if name == "fp8 blocks":
        with pytest.raises(LoadError, match=r"whole groups of 128 columns"):
            load_rank(folder, 1, 2)
        return
    for rank in range(2):
        for own, want in zip(load_rank(folder, rank, 2).layers, load_rank(source, rank, 2).layers, strict=True):
            for pick in (
                lambda layer: layer.attention.qkv, lambda layer: layer.attention.output, lambda layer: layer.feed_forward.gate_up,
                lambda layer: layer.feed_forward.down,
            ):
                torch.testing.assert_close(pick(own).weight, pick(want).weight, rtol=0, atol=1e-6)


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
            kept = own.weight.weight if method == "fp8" else own.weight
            weight = weight.detach()
            assert 0.001 < float((kept - weight).norm() / weight.norm()) < (0.04 if method == "fp8" else 0.15)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name:
                parameter.copy_(stored.rounded(parameter, method, 128, name).dense(torch.float32))
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = Forward(executor).chunk(PROMPT)
    if method == "int4":
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    else:  # activations are rounded too
        assert 0.001 < float((got - want).norm() / want.norm()) < 0.5


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
