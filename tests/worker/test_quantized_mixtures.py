"""Mixtures of experts and latent attention, from quantized files and rounded on the way in: on one rank, on two, as kernels keep them."""

import os
from dataclasses import replace
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker import compressed_model
from worker.family_model import NUM_BLOCKS, PROMPT, Forward, executor_for, write_family
from worker.quantized_files import EIGHT_BITS, FORMATS, write_quantized
from worker.two_ranks import halves_of, logits_of_two

from pagecast_kernels import quantized_rows, reference_quantized
from pagecast_kernels.quantized_weights import PackedExperts, ScaledExperts
from pagecast_kernels.routing import Routing
from pagecast_worker import cpu_ops
from pagecast_worker.backend import cuda_operators, products_over
from pagecast_worker.executor import LoadError
from pagecast_worker.kv_cache import KVCache
from pagecast_worker.layers import quantized
from pagecast_worker.layers.experts import Experts
from pagecast_worker.layers.quantized import CpuQuantized, Packed, Rounded, Scaled
from pagecast_worker.loading import products, stored
from pagecast_worker.loading.load import load_model, open_checkpoint
from pagecast_worker.parallel import Ranks

QWEN = {"num_hidden_layers": 2, "mlp_only_layers": [], "num_experts": 6, "moe_intermediate_size": 128}
DEEPSEEK = {
    "num_hidden_layers": 2, "moe_intermediate_size": 256, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 64, "head_dim": None,
}  # fmt: skip
MIXTURES = {
    "awq qwen": ("awq", "Qwen3MoeForCausalLM", QWEN), "awq mixtral": ("awq", "MixtralForCausalLM", {}),
    "gptq mixtral": ("gptq int4", "MixtralForCausalLM", {}), "act-order qwen": ("gptq act-order", "Qwen3MoeForCausalLM", QWEN),
    "fp8 blocks qwen": ("fp8 blocks", "Qwen3MoeForCausalLM", QWEN),
    "fp8 blocks deepseek": ("fp8 blocks", "DeepseekV3ForCausalLM", DEEPSEEK),
    "awq deepseek": ("awq", "DeepseekV2ForCausalLM", DEEPSEEK | {"q_lora_rank": None}),
}  # fmt: skip


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def rounded_by_hand(executor, change, but=frozenset()):
    """Every product's weight replaced by what `change` makes of a matrix of it, and operators for that. but: ids of layers left out."""
    for product in all_products(executor):
        if id(product.layer) in but:
            continue
        weight = product.layer.weight
        product.layer.weight = change(weight) if weight.dim() == 2 else stacked([change(own) for own in weight])
    executor.ops = SimpleNamespace(**{**vars(cpu_ops), **products_over(CpuQuantized(cpu_ops))})
    return executor


def stacked(weights):
    if isinstance(weights[0], Rounded):
        return Rounded(torch.stack([weight.weight for weight in weights]), weights[0].dtype)
    return torch.stack(weights)


def eight_bits(weight: torch.Tensor) -> Rounded:
    """A weight that meets activations of e4m3."""
    return Rounded(weight, torch.float8_e4m3fn)


def experts_of(executor) -> list[Experts]:
    return [layer.feed_forward for layer in executor.model.layers if isinstance(layer.feed_forward, Experts)]


@pytest.mark.parametrize("name", MIXTURES)
def test_files_mean_what_they_should_on_one_rank_and_on_two(name, tmp_path):
    form, family, changes = MIXTURES[name]
    folder, source = write_quantized(tmp_path, *FORMATS[form], family, **changes)
    want = Forward(executor_for(source)).chunk(PROMPT)
    executor = executor_for(folder)
    torch.testing.assert_close(Forward(executor).chunk(PROMPT), want, rtol=0, atol=1e-4)
    assert experts_of(executor) and executor.facts.quantization
    if form == "gptq act-order":
        with pytest.raises(LoadError, match=r"tensor_parallel_size must be 1: the columns of model.layers.0.self_attn.o_proj"):
            logits_of_two(folder)
        return
    for got in logits_of_two(folder):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", EIGHT_BITS)
@pytest.mark.parametrize(("family", "changes"), [("MixtralForCausalLM", {}), ("DeepseekV3ForCausalLM", DEEPSEEK)])
def test_experts_of_eight_bits_keep_the_weights_and_round_what_meets_them(form, family, changes, tmp_path):
    folder, source = write_quantized(tmp_path, *EIGHT_BITS[form], family, **changes)
    executor, plain = executor_for(folder), executor_for(source)
    for own, meant in zip(experts_of(executor), experts_of(plain), strict=True):
        assert isinstance(own.down.weight, Rounded) and torch.equal(own.down.weight.weight, meant.down.weight)
    got, want = (Forward(one).chunk(PROMPT) for one in (executor, plain))
    assert apart(got, want) > 1e-3
    torch.testing.assert_close(Forward(rounded_by_hand(plain, eight_bits)).chunk(PROMPT), got, rtol=0, atol=1e-4)
    for rank, half in enumerate(halves_of(folder)):
        for own, whole in zip(experts_of(half), experts_of(executor), strict=True):
            parts = whole.down.weight.weight.chunk(2, 2), whole.gate_up.weight.weight.unflatten(1, (2, 2, -1))[:, :, rank].flatten(1, 2)
            assert torch.equal(own.down.weight.weight, parts[0][rank]) and torch.equal(own.gate_up.weight.weight, parts[1])


def test_a_mixture_rounds_rows_as_the_kernels_do():
    generator = torch.Generator().manual_seed(3)
    x, logits = torch.randn(7, 64, generator=generator), torch.randn(7, 4, generator=generator)
    gate_up, down = torch.randn(4, 64, 64, generator=generator), torch.randn(4, 64, 32, generator=generator)
    got = CpuQuantized(cpu_ops).mixture(x, logits, eight_bits(gate_up), eight_bits(down), Routing(2))

    def eight(row):
        scale = row.abs().max() / 448
        return (row / scale).to(torch.float8_e4m3fn).float() * scale

    for token in range(7):
        scores, chosen = logits[token].softmax(-1).topk(2)
        want = torch.zeros(64)
        for score, expert in zip(scores / scores.sum(), chosen.tolist(), strict=True):
            gate, up = (gate_up[expert] @ eight(x[token])).chunk(2)
            want += score * (down[expert] @ eight(torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[token], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["w4a16 symmetric", "w8a8 fp8"])
def test_files_of_the_library_with_experts_by_name(scheme, tmp_path):
    """compressed-tensors over a Qwen3-MoE whose experts are modules, as the ecosystem's files name them."""
    folder, source = compressed_model.write_compressed_mixture(tmp_path, scheme, "Qwen3MoeForCausalLM", **QWEN)
    plain = executor_for(source)
    if scheme.startswith("w8a8"):
        plain = rounded_by_hand(plain, eight_bits)
    torch.testing.assert_close(Forward(executor_for(folder)).chunk(PROMPT), Forward(plain).chunk(PROMPT), rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["fp8", "int4"])
@pytest.mark.parametrize(("family", "changes"), [("Qwen3MoeForCausalLM", QWEN), ("DeepseekV3ForCausalLM", DEEPSEEK)])
def test_experts_and_latent_projections_rounded_while_they_load(method, family, changes, tmp_path):
    folder, model = write_family(family, tmp_path, hidden_size=128, **changes)
    executor = executor_for(folder, quantization=method)
    assert executor.facts.num_parameters == sum(parameter.numel() for parameter in model.parameters()) + router_biases(executor)
    plain = executor_for(folder)
    last = {id(product.layer) for product in products.products_of(plain.model.layers[-1].feed_forward)} if method == "fp8" else set()
    for product, exact in zip(all_products(executor), all_products(plain), strict=True):
        if id(exact.layer) in last:
            assert torch.equal(product.layer.weight, exact.layer.weight)
            continue
        kept = product.layer.weight.weight if method == "fp8" else product.layer.weight
        error = float((kept - exact.layer.weight).norm() / exact.layer.weight.norm())
        assert 0.001 < error < (0.04 if method == "fp8" else 0.2)
    got, want = (Forward(one).chunk(PROMPT) for one in (executor, plain))
    assert apart(got, want) > 0.001
    meant = lambda weight: stored.rounded(weight, method, products.ONLINE_GROUP, "").dense(torch.float32)
    by_hand = rounded_by_hand(plain, lambda weight: eight_bits(meant(weight)) if method == "fp8" else meant(weight), last)
    if method == "int4":
        plain.model.head.weight = stored.rounded(plain.model.head.weight, "int8", 0, "").dense(torch.float32)
    torch.testing.assert_close(got, Forward(by_hand).chunk(PROMPT), rtol=0, atol=1e-4)


def router_biases(executor) -> int:
    return sum(len(block.bias) for block in experts_of(executor) if block.bias is not None)


def all_products(executor):
    return [product for layer in executor.model.layers for product in products.products_of(layer)]


ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
CASES = [
    ("Qwen3MoeForCausalLM", QWEN | {"num_hidden_layers": 1}, {"quantization": "int4"}, (PackedExperts, Packed)),
    ("Qwen3MoeForCausalLM", QWEN, {"quantization": "fp8"}, (ScaledExperts, Scaled, torch.Tensor)),
    ("DeepseekV3ForCausalLM", DEEPSEEK | ONE_LAYER, {"quantization": "int4"}, (PackedExperts, Packed)),
    # One row has kernels of its own here, in layers and in the head.
    ("Qwen2ForCausalLM", {"num_hidden_layers": 1, "tie_word_embeddings": False}, {"quantization": "int4"}, (Packed,)),
]


@pytest.mark.parametrize(("family", "changes", "options", "kinds"), CASES, ids=lambda value: str(value)[:24])
def test_kernels_compute_what_the_cpu_computes(family, changes, options, kinds, tmp_path, monkeypatch):
    folder, _ = write_family(family, tmp_path, hidden_size=128, **changes)
    want = executor_for(folder, **options)
    monkeypatch.setattr(products, "for_kernels", lambda device: True)
    config, cpu = replace(want.config, dtype="float16"), torch.device("cpu")
    with torch.inference_mode():
        model = load_model(config, open_checkpoint(config, cpu), Ranks(), cpu, torch.float16, lambda progress: None).model
        cache = KVCache(NUM_BLOCKS, model.config.num_layers, model.kv_shape, config.block_size, cpu, torch.float16)
    for name in ("quantize_rows", "rms_norm_quantized", "add_rms_norm_quantized", "silu_mul_quantized"):
        monkeypatch.setattr(quantized_rows, name, getattr(reference_quantized, name))  # the interpreter rounds to e4m3 wrongly
    executor = SimpleNamespace(config=config, model=model, cache=cache, ops=cuda_operators(config, model, cpu))
    assert {type(product.layer.weight) for product in all_products(executor)} == set(kinds)
    assert isinstance(executor.model.head.weight, Packed if options["quantization"] == "int4" else torch.Tensor)
    assert executor.ops.one_row == (kinds == (Packed,))
    one, other = Forward(executor), Forward(want)
    for ids in (PROMPT[:5], [9]):  # both choose the same experts for these: none is chosen by a hair's breadth
        got, exact = (forward.chunk(ids).float() if len(ids) > 1 else forward.decode(ids[0]).float() for forward in (one, other))
        assert apart(got, exact) < (0.1 if options["quantization"] == "fp8" else 0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_head_takes_one_row_few_rows_and_many_in_parts(bias, monkeypatch):
    monkeypatch.setattr(quantized, "DENSE_FROM", 6)
    monkeypatch.setattr(quantized, "MOST_DENSE", 150 * 128)
    generator = torch.Generator().manual_seed(7)
    weight = stored.rounded(torch.randn(300, 128, generator=generator), "int8", 0, "lm_head")
    packed, operators = Packed(products._packed(weight, False)), quantized.GpuQuantized(None, torch.device("cpu"))
    added = torch.randn(300, generator=generator).half() if bias else None
    for rows in (1, 5, 6):
        x, out = torch.randn(rows, 128, generator=generator).half(), torch.full((rows, 300), float("nan")).half()
        assert operators.linear(x, packed, added, out) is out
        want = x.double() @ weight.dense(torch.float64).T + (added.double() if bias else 0)
        assert apart(out.double(), want) < 2e-3


def test_experts_that_are_stored_unlike_are_kept_plain(tmp_path):
    """One expert left out of quantization, as an ignore list may ask for."""
    folder, source = write_quantized(tmp_path, *FORMATS["awq"], "MixtralForCausalLM")
    tensors, meant = load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    kept = {key: value for key, value in tensors.items() if not key.startswith(name + ".")}
    save_file(kept | {f"{name}.weight": meant[f"{name}.weight"]}, folder / "model.safetensors")
    executor = executor_for(folder)
    torch.testing.assert_close(Forward(executor).chunk(PROMPT), Forward(executor_for(source)).chunk(PROMPT), rtol=0, atol=1e-4)
    missing = {key: value for key, value in tensors.items() if key != f"{name}.scales"}
    save_file(missing, folder / "model.safetensors")
    with pytest.raises(LoadError, match=rf"tensor {name}.scales is missing"):
        executor_for(folder)


def test_groups_of_experts_that_a_split_would_cut_are_refused_by_name(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["awq"], "MixtralForCausalLM", intermediate_size=96)
    with pytest.raises(LoadError, match=r"groups of 32 columns, .* of model.layers.0.block_sparse_moe.experts.0.w2, got 48 columns"):
        logits_of_two(folder)
