"""Checkpoints that compressed-tensors quantizes and writes give the logits of that library's own modules."""

import json

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter, FP8BlockDequantizer
from safetensors.torch import load_file, save_file
from worker import compressed_model
from worker.family_model import PROMPT, Forward, executor_for, write_family
from worker.quantized_files import FORMATS, SIZES, write_quantized

from pagecast_worker.quantizing.run import Job, quantize


@pytest.mark.parametrize("scheme", compressed_model.SCHEMES)
def test_logits_of_the_library(scheme, tmp_path):
    folder, logits = compressed_model.write_compressed(tmp_path, scheme)
    executor = executor_for(folder)
    got = Forward(executor).chunk(PROMPT)
    if scheme.startswith("w8a8"):
        # An activation next to the middle between two of 8 bits may be rounded to the other one: a few logits then differ.
        assert float((got - logits).norm() / logits.norm()) < 0.01
        assert float(((got - logits).abs() < 1e-3).float().mean()) > 0.6
    else:
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-3)
    plain = Forward(executor_for(tmp_path / "plain")).chunk(PROMPT)
    assert float((plain - logits).abs().max()) > 0.01  # the weights differ from those that were rounded
    assert executor.facts.quantization and executor.facts.num_parameters == executor_for(tmp_path / "plain").facts.num_parameters


def converted(folder, out, converter):
    """The checkpoint that the library makes of one in a form that is not its own."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    out.mkdir()
    save_file(converter.process(tensors), out / "model.safetensors", metadata={"format": "pt"})
    config, own = json.loads((folder / "config.json").read_text()), converter.update_config(None)
    config["quantization_config"] = None if own is None else json.loads(own.model_dump_json())
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_the_library_reads_awq_as_it_is_read_here(tmp_path):
    """Written by `pagecast quantize`; the library unpacks it by rules of its own into a form whose reading is held to it above."""
    source, _ = write_family("LlamaForCausalLM", tmp_path / "plain", **SIZES)
    sequences = [[(7 * i * i + 3 * i + 11 * n) % 150 + 3 for i in range(64)] for n in range(4)]
    job = Job(source, tmp_path / "awq", "awq", 32, sequences, torch.device("cpu"))
    quantize(job, lambda done, total, text: None)
    theirs = converted(tmp_path / "awq", tmp_path / "theirs", AutoAWQConverter.from_pretrained(tmp_path / "awq"))
    got, want = (executor_for(path) for path in (tmp_path / "awq", theirs))
    assert (got.facts.quantization, want.facts.quantization) == ("AWQ-int4", "W4A16")
    torch.testing.assert_close(Forward(got).chunk(PROMPT), Forward(want).chunk(PROMPT), rtol=0, atol=1e-4)


def test_the_library_reads_blocks_of_fp8_as_they_are_read_here(tmp_path):
    folder, _ = write_quantized(tmp_path, *FORMATS["fp8 blocks"])
    converter = FP8BlockDequantizer.from_pretrained(folder, dtype=torch.float32)
    theirs = converted(folder, tmp_path / "theirs", converter)
    got, want = (Forward(executor_for(path)).chunk(PROMPT) for path in (folder, theirs))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
