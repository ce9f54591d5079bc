"""Written checkpoints: what they mean is what was meant, other readers read them, and a run that was cut off gives the same files."""

import json

import pytest
import torch
from safetensors.torch import load_file
from worker.family_model import PROMPT, Forward, executor_for, write_family

from pagecast_worker.executor import LoadError
from pagecast_worker.loading import stored
from pagecast_worker.loading.stored import rounded
from pagecast_worker.quantizing import rounding
from pagecast_worker.quantizing.calibration import sequences_of
from pagecast_worker.quantizing.run import Job, quantize

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SEQUENCES = [[(7 * i * i + 3 * i + 11 * n) % 150 + 3 for i in range(64)] for n in range(8)]


def job(source, out, method, sequences=()):
    return Job(source, out, method, 32, list(sequences), torch.device("cpu"))


def silent(done: int, total: int, text: str) -> None:
    pass


def test_errors_of_gptq_cost_less_than_those_of_rounding():
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(192, 192, generator=generator)
    x = torch.randn(2000, 192, generator=generator) @ mixed * torch.rand(192, generator=generator).pow(3)
    weight, hessian = torch.randn(64, 192, generator=generator), x.t() @ x
    cost = lambda stored: float(((stored.dense(torch.float32) - weight) @ hessian * (stored.dense(torch.float32) - weight)).sum())
    nearest = cost(rounding.nearest(weight, 64, torch.float16, ""))
    assert cost(rounding.gptq(weight, hessian, 64, torch.float16, "")) < 0.5 * nearest
    assert cost(rounding.gptq_fp8(weight, hessian, "")) < 0.5 * cost(rounded(weight, "fp8", 0, ""))
    scales = rounding.awq_scales([weight], hessian, x.abs().mean(0), 64)
    scaled = rounding.asymmetric(weight * scales, 64, "").dense(torch.float32) / scales
    plain = cost(rounding.asymmetric(weight, 64, ""))
    assert float(((scaled - weight) @ hessian * (scaled - weight)).sum()) <= plain
    # Where inputs tell nothing apart, neither can do better than rounding with the best scales.
    assert cost(rounding.gptq(weight, hessian * 0 + torch.eye(192), 192, torch.float16, "")) > 0


def test_scales_of_eight_bits_cost_less_than_those_of_the_largest_magnitude(monkeypatch):
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(1))
    weight[5] = 0.0
    importance = torch.arange(192.0).remainder(64).pow(4)
    largest = weight.abs().amax(1, keepdim=True) / 448

    def errors(scales: torch.Tensor) -> torch.Tensor:
        return (stored.fp8_values(weight, scales.clamp(min=1e-10)).float() * scales - weight).square()

    plain, weighed = stored.fp8_scales(weight), stored.fp8_scales(weight, importance)
    for scales in (plain, weighed):
        assert bool(((scales >= largest) & (scales < 2 * largest.clamp(min=1e-9))).all())
    assert bool((errors(plain).sum(1) <= 1.001 * errors(largest).sum(1)).all())
    assert float(errors(plain).sum()) < 0.93 * float(errors(largest).sum())
    assert float((errors(weighed) @ importance).sum()) < 0.97 * float((errors(plain) @ importance).sum())
    assert torch.equal(rounded(weight, "fp8", 0, "").scales, plain)
    monkeypatch.setattr(stored, "_ELEMENTS_AT_ONCE", (1000, 1000))
    assert torch.equal(stored.fp8_scales(weight, importance), weighed)


@pytest.mark.parametrize(("method", "name"), [
    ("rtn-int4", "Qwen2ForCausalLM"), ("fp8", "LlamaForCausalLM"), ("gptq", "Gemma2ForCausalLM"), ("awq", "LlamaForCausalLM"),
    ("awq", "Gemma3ForCausalLM"), ("gptq", "Qwen3ForCausalLM"),
])  # fmt: skip
def test_written_checkpoints_are_near_the_model(method, name, tmp_path):
    source, _ = write_family(name, tmp_path / "plain", **SIZES)
    sequences = () if method == "rtn-int4" else SEQUENCES
    quantize(job(source, tmp_path / "out", method, sequences), silent)
    executor = executor_for(tmp_path / "out")
    assert executor.facts.quantization == {"awq": "AWQ-int4", "fp8": "W8A8-FP8"}.get(method, "W4A16")
    for quantized, plain in zip(executor.model.layers, executor_for(source).model.layers, strict=True):
        # AWQ moves size between a norm and the weights after it: their product is what stays.
        blocks = {"attention_norm": lambda layer: layer.attention.qkv, "feed_forward_norm": lambda layer: layer.feed_forward.gate_up}
        for norm, block in blocks.items():
            got, want = (getattr(layer, norm).float() * _plain(block(layer).weight) for layer in (quantized, plain))
            kept = method == "fp8" and norm == "feed_forward_norm" and quantized is executor.model.layers[-1]
            least, most = (0, 0.001) if kept else (0.001, 0.25)
            assert least <= float((got - want).norm() / want.norm()) < most
    assert bool(Forward(executor).chunk(PROMPT).isfinite().all())
    assert not (tmp_path / "out" / "quantize.json").exists()


ONE = {"num_hidden_layers": 1}
MIXTURES = {
    "gptq": ("Qwen3MoeForCausalLM", ONE | {"mlp_only_layers": []}), "awq": ("MixtralForCausalLM", ONE),
    "fp8": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 2, "first_k_dense_replace": 0, "head_dim": None}),
    "rtn-int4": ("Qwen3MoeForCausalLM", ONE | {"mlp_only_layers": []}),
}  # fmt: skip


@pytest.mark.parametrize("method", MIXTURES)
def test_written_experts_are_near_the_model(method, tmp_path):
    name, changes = MIXTURES[method]
    source, _ = write_family(name, tmp_path / "plain", **SIZES | changes)
    quantize(job(source, tmp_path / "out", method, () if method == "rtn-int4" else SEQUENCES[:2]), silent)
    quantized, plain = executor_for(tmp_path / "out"), executor_for(source)
    written = load_file(next((tmp_path / "out").glob("model-00002-of-*.safetensors")))
    marker = {"awq": ".qweight", "fp8": ".weight_scale"}.get(method, ".weight_packed")
    assert any(".experts.3." in key and key.endswith(marker) for key in written)
    for layer, exact in zip(quantized.model.layers, plain.model.layers, strict=True):
        got, want = layer.feed_forward, exact.feed_forward
        least, most = (0, 0.001) if method == "fp8" and layer is quantized.model.layers[-1] else (0.001, 0.35)
        for down, gate_up, exact_down, exact_gate_up in zip(
            _plain(got.down.weight), _plain(got.gate_up.weight), want.down.weight, want.gate_up.weight, strict=True
        ):
            # AWQ moves size from an expert's up rows to its down columns: their product is what stays.
            ours, theirs = down @ gate_up.chunk(2)[1], exact_down @ exact_gate_up.chunk(2)[1]
            assert least <= float((ours - theirs).norm() / theirs.norm()) < most
        if method == "fp8":
            pairs = [(getattr(layer.attention, part), getattr(exact.attention, part)) for part in ("down", "query", "output")]
            assert all(0.001 < float((_plain(a.weight) - b.weight).norm() / b.weight.norm()) < 0.2 for a, b in pairs)
            assert torch.allclose(layer.attention.up, exact.attention.up, rtol=0, atol=4e-3)  # in the file's own 16 bits
    assert bool(Forward(quantized).chunk(PROMPT).isfinite().all())


@pytest.mark.parametrize("sequences", [(), SEQUENCES[:2]], ids=["to the nearest", "calibrated"])
def test_in_eight_bits_the_last_feed_forward_block_stays_as_it_is(sequences, tmp_path):
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", **SIZES)
    quantize(job(source, tmp_path / "out", "fp8", sequences), silent)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert [f"model.layers.1.mlp.{part}_proj" for part in ("down", "gate", "up")] == [one for one in ignored if "layers" in one]
    first, last = (layer.feed_forward.down.weight for layer in executor_for(tmp_path / "out").model.layers)
    assert isinstance(last, torch.Tensor) and not isinstance(first, torch.Tensor)


def _plain(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.weight


@pytest.mark.parametrize("method", ["rtn-int4", "fp8"])
def test_the_library_reads_what_was_written(method, tmp_path):
    """transformers loads it through compressed-tensors, and computes the same."""
    import transformers

    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", **SIZES)
    quantize(job(source, tmp_path / "out", method), silent)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = Forward(executor_for(tmp_path / "out")).chunk(PROMPT)
    if method == "fp8":  # activations next to the middle between two of 8 bits may fall to either side
        assert float((got - want).norm() / want.norm()) < 0.05
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


def test_a_run_that_was_cut_off_goes_on_and_ends_the_same(tmp_path):
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", **SIZES)
    quantize(job(source, tmp_path / "whole", "gptq", SEQUENCES), silent)

    class Cut(Exception):
        pass

    def cut(done: int, total: int, text: str) -> None:
        if text == "layer 2 of 2":
            raise Cut

    with pytest.raises(Cut):
        quantize(job(source, tmp_path / "cut", "gptq", SEQUENCES), cut)
    assert not (tmp_path / "cut" / "config.json").exists()
    with pytest.raises(LoadError, match="another run"):
        quantize(job(source, tmp_path / "cut", "gptq", SEQUENCES[:4]), silent)
    quantize(job(source, tmp_path / "cut", "gptq", SEQUENCES), silent)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            one, other = (load_file(tmp_path / folder / name) for folder in ("whole", "cut"))
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path):
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain")
    with pytest.raises(LoadError, match=r"group_size must divide the 64 columns of model.layers.0.self_attn.q_proj.weight for awq"):
        quantize(Job(source, tmp_path / "out", "awq", 128, SEQUENCES, torch.device("cpu")), silent)
    quantize(job(source, tmp_path / "eight", "fp8"), silent)
    with pytest.raises(LoadError, match=r"is quantized already \(W8A8-FP8\)"):
        quantize(job(tmp_path / "eight", tmp_path / "again", "fp8"), silent)
    with pytest.raises(LoadError, match="is not empty"):
        quantize(job(source, source, "fp8"), silent)
    assert json.loads((tmp_path / "eight" / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"


def test_sequences_are_spread_over_the_text():
    assert list(sequences_of(list(range(100)), 10, 3)) == [list(range(at, at + 10)) for at in (0, 30, 60)]
    assert list(sequences_of(list(range(25)), 10, 8)) == [list(range(10)), list(range(10, 20))]
    assert list(sequences_of([1, 2], 10, 8)) == []
