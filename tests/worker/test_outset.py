"""What is told of a start before anything of the model but its configuration is read, and without torch."""

import subprocess
import sys

import pytest
import torch
from e2e.cli_server import pagecast
from worker.family_model import family_config
from worker.smollm2 import model_file
from worker.tiny_model import TINY, write_config

from pagecast_worker import outset
from pagecast_worker.config import ConfigError, WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.load import load_model
from pagecast_worker.parallel import Ranks

GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}}
LONGEST = TINY["max_position_embeddings"]
BLOCK_BYTES = 2 * 2 * 16 * 64 * 4
"""Of the tiny model in float32: layers, heads, tokens, elements of K and V."""


def config_for(folder, **options):
    return WorkerConfig(run_dir="/unused", model=str(folder), **{"device": "cpu", **options})


@pytest.mark.parametrize(("changes", "options", "said"), [
    ({}, {"max_model_len": LONGEST + 1}, f"max_model_len must be at most {LONGEST} for this model, got {LONGEST + 1}"),
    (GPTQ, {"quantization": "fp8"}, "quantization must not be given for a checkpoint that is quantized (GPTQ-int4), got fp8"),
    (GPTQ, {"device": "cuda", "dtype": "float32"}, "dtype must be bfloat16 or float16 for quantized weights on a GPU, got float32"),
    (GPTQ, {"device": "cuda", "batch_invariant": True},
     "batch_invariant takes models with 16-bit weights, without experts and without latent attention"),
    ({}, {"batch_invariant": True}, "batch_invariant needs a GPU, this worker runs on a CPU"),
    ({}, {"cpu_kv_gib": 1e-6, "dtype": "float32"}, "cpu_kv_gib must be at least 3.07e-05, got 1e-06"),
    ({}, {"num_blocks": 10**12}, "num_blocks 1000000000000 takes"),
    ({"architectures": ["Unheard"]}, {}, "field architectures is ['Unheard']; known are"),
    ({"hidden_size": "wide"}, {}, "field hidden_size must be a positive integer, got 'wide'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_option(tmp_path, changes, options, said):
    with pytest.raises(ConfigError) as caught:
        outset.check(config_for(write_config(tmp_path, **changes), **options))
    assert said in str(caught.value)


def test_latent_attention_has_no_cache_of_eight_bits(tmp_path):
    family_config("DeepseekV2ForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be auto for a model with latent attention, got fp8"):
        outset.check(config_for(tmp_path, kv_cache_dtype="fp8"))


@pytest.mark.parametrize(("option", "value", "said"), [
    ("dtype", "int8", "dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
    ("device", "gpu", "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
])  # fmt: skip
def test_names_that_nothing_has_are_refused(option, value, said):
    with pytest.raises(ConfigError) as caught:
        config_for("/unused", **{option: value})
    assert str(caught.value) == said


def test_a_pool_that_holds_no_longest_sequence_is_told(tmp_path):
    folder = write_config(tmp_path)
    asked = outset.check(config_for(folder, num_blocks=9, max_model_len=200))
    assert asked == "num_blocks 9 holds sequences of at most 128 tokens; max_model_len 200 is lowered to what fits"
    granted = outset.check(config_for(folder, cpu_kv_gib=5 * BLOCK_BYTES / (1 << 30), dtype="float32"))
    assert granted is not None and granted.endswith(f"holds sequences of at most 64 tokens; the model's {LONGEST} is lowered to what fits")
    assert outset.check(config_for(folder, num_blocks=9, max_model_len=128)) is None
    outset.check(config_for(folder, cpu_kv_gib=3.07e-5, dtype="float32"))
    assert outset.check(config_for(folder)) is None


def test_what_other_machines_have_is_theirs_to_say(tmp_path):
    folder = write_config(tmp_path)
    for options in ({"batch_invariant": True, "device": "auto"}, {"num_blocks": 1 << 40}, {"cpu_kv_gib": 1e-6}):
        assert outset.check(config_for(folder, **options), here=False) is None


def test_a_gguf_file_is_asked_too():
    with pytest.raises(ConfigError, match="max_model_len must be at most 8192 for this model, got 8193"):
        outset.check(config_for(model_file(), max_model_len=8193))
    assert outset.check(config_for(model_file(), max_model_len=8192)) is None


def test_neither_serve_nor_a_worker_starts_with_what_cannot_work(tmp_path):
    folder = str(write_config(tmp_path))
    words = ("--max-model-len", str(LONGEST + 1))
    said = f"--max-model-len must be at most {LONGEST} for this model, got {LONGEST + 1}"
    served = pagecast("serve", folder, "--port", "0", *words)
    assert (served.returncode, served.stdout, served.stderr) == (2, "", f"pagecast serve: {said}\n")
    worked = pagecast("worker", "--run-dir", str(tmp_path), "--model", folder, *words)
    assert (worked.returncode, worked.stdout, worked.stderr) == (2, "", f"pagecast worker: {said}\n")


def test_asking_loads_no_torch(tmp_path):
    lines = (
        "import sys", "from pagecast_worker import outset", "from pagecast_worker.config import WorkerConfig",
        f"for model in {[str(write_config(tmp_path)), str(model_file())]!r}:", "    outset.check(WorkerConfig('/unused', model))",
        "assert not {'torch', 'triton'} & {*sys.modules}",
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_that_learns_of_its_device_late_has_read_no_weights_by_then(tmp_path):
    class Unread:
        config, scheme = outset.described(config_for(write_config(tmp_path)))

        def __getattr__(self, name):
            raise AssertionError(f"{name} of the checkpoint was asked for")

    with pytest.raises(LoadError, match="batch_invariant needs a GPU"):
        config = config_for(tmp_path, batch_invariant=True)
        load_model(config, Unread(), Ranks(), torch.device("cpu"), torch.float32, lambda progress: None)
