"""Model folders: what they become, and how each broken one is refused by name."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker.plan_driver import Driver, Job
from worker.tiny_model import TINY, write_config, write_model

from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.models.config import RopeScaling
from pagecast_worker.torch_executor import TorchExecutor


def executor_of(folder, **options):
    return TorchExecutor(
        WorkerConfig(run_dir="/unused", model=str(folder), device="cpu", dtype="float32", num_blocks=40, max_num_seqs=4, **options)
    )


def refusal(folder, **options):
    with pytest.raises(LoadError) as caught:
        executor_of(folder, **options).load(lambda progress: None)
    text = str(caught.value)
    assert "\n" not in text
    return text


def greedy(executor, prompt, count):
    driver = Driver(executor, 40, max_num_seqs=4, max_model_len=128)
    job = Job(prompt, count)
    driver.admit(job)
    driver.chunk(job)
    driver.plan()
    driver.finish()
    return job.output


def test_sharded_folder_computes_what_transformers_computes(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path, shards=3)
    executor = executor_of(folder)
    seen = []
    facts, _ = executor.load(seen.append)
    prompt = [(13 * i) % 500 + 5 for i in range(40)]
    output = greedy(executor, prompt, 12)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    assert float((logits.max(1).values - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)).max()) < 1e-4
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    done = [progress.done for progress in seen if progress.phase == "weights"]
    assert done == sorted(done) and done[-1] == 4 * facts.num_parameters
    assert [*dict.fromkeys(progress.phase for progress in seen)] == ["device", "weights", "kernels", "memory", "steps", "warm-up"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rotary_angles_are_those_of_transformers(tmp_path, rope):
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path, rope_scaling=rope)
    executor = executor_of(folder)
    executor.load(lambda progress: None)
    prompt = [(29 * i) % 500 + 5 for i in range(100)]
    output = greedy(executor, prompt, 8)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    assert float((logits.max(1).values - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)).max()) < 1e-4


def test_digest_follows_the_weights(tmp_path):
    digests = []
    for name in ("a", "b", "c"):
        folder = write_model(tmp_path / name)
        if name == "c":
            file = folder / "model-00001-of-00002.safetensors"
            save_file({k: v + 1 for k, v in load_file(file).items()}, file)
        executor = executor_of(folder)
        digests.append(executor.load(lambda progress: None)[0].digest)
    assert digests[0] == digests[1] != digests[2]


def change_shard(folder, change):
    file = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def test_missing_tensor(tmp_path):
    folder = write_model(tmp_path)
    change_shard(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(folder) == f"{folder}: tensor lm_head.weight is missing"


def test_tensor_that_nothing_uses(tmp_path):
    folder = write_model(tmp_path)
    file = change_shard(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(1)}))
    assert refusal(folder) == f"{file}: tensor model.layers.0.extra.weight belongs to nothing in a LlamaForCausalLM"


def test_wrong_shape(tmp_path):
    folder = write_model(tmp_path)
    file = change_shard(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 4)}))
    assert refusal(folder) == f"{file}: tensor lm_head.weight has shape [3, 4], the configuration asks for [512, 128]"


def test_integer_tensor(tmp_path):
    folder = write_model(tmp_path)
    file = change_shard(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 128, dtype=torch.int8)}))
    assert refusal(folder) == f"{file}: tensor lm_head.weight is of type torch.int8, which is not understood"


def test_truncated_file(tmp_path):
    folder = write_model(tmp_path)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(folder) == f"{file}: truncated, or not a safetensors file"


def test_file_named_by_the_index_is_not_there(tmp_path):
    folder = write_model(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "names the file model-00002-of-00002.safetensors, which is not in the folder" in refusal(folder)


def test_index_cannot_lead_out_of_the_folder(tmp_path):
    folder = write_model(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}))
    assert "../other.safetensors" in refusal(folder)


def sums(folder, **changes):
    """SHA256SUMS of all files of a folder, with lines changed or (None) left out."""
    lines = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} | changes
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in lines.items() if digest is not None))


def test_files_are_what_the_manifest_says(tmp_path):
    folder = write_model(tmp_path)
    sums(folder)
    assert executor_of(folder).load(lambda progress: None)[0].num_parameters


def test_file_that_is_not_what_the_manifest_says(tmp_path):
    folder = write_model(tmp_path)
    sums(folder)
    file = change_shard(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    assert refusal(folder) == f"{file}: does not have the SHA-256 that SHA256SUMS states"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config.json": None}, "config.json: is not named in SHA256SUMS"),
        ({"gone.safetensors": "0" * 64}, "gone.safetensors: named in SHA256SUMS, cannot be read"),
        ({"config.json": "12"}, "is not a SHA-256 and the name of a file"),
        ({"../config.json": "0" * 64}, "is not a SHA-256 and the name of a file"),
    ],
)
def test_manifest_that_does_not_fit(tmp_path, changes, said):
    folder = write_model(tmp_path)
    sums(folder, **changes)
    assert said in refusal(folder)


def test_folder_without_weights(tmp_path):
    assert refusal(write_config(tmp_path)) == f"{tmp_path}: no .safetensors file here"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"a_new_idea": True}, "a_new_idea"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModel": "code.Model"}, "model_type": "a_new_kind"}, "auto_map"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "wide"}, "sliding_window"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["round"] * 2}, "layer_types"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_configuration_that_is_not_understood(tmp_path, changes, named):
    assert f"field {named} " in refusal(write_config(tmp_path, **changes))


def test_code_beside_a_known_model_type_is_left_alone(tmp_path):
    folder = write_model(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Own"}, architectures=["OwnForCausalLM"])
    (folder / "modeling.py").write_text("raise SystemExit")
    assert executor_of(folder).load(lambda progress: None)[0].architecture == "LlamaForCausalLM"


def test_configuration_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'}: not a JSON file"


def test_end_tokens_come_from_the_generation_config(tmp_path):
    folder = write_config(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 5e5}, rope_theta=None)
    assert read_config(folder)[0].eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    config, _ = read_config(folder)
    assert (config.eos_token_ids, config.rope_theta, config.rope_scaling) == ((7, 9), 5e5, RopeScaling("linear", 2.0))


def test_longer_than_the_model_knows_positions_for(tmp_path):
    limit = TINY["max_position_embeddings"]
    text = refusal(write_model(tmp_path), max_model_len=limit + 1)
    assert text == f"max_model_len must be at most {limit} for this model, got {limit + 1}"


def test_random_weights_need_only_a_configuration(tmp_path):
    folder = write_config(tmp_path)
    made = []
    for _ in range(2):
        executor = executor_of(folder, random_weights=str(folder))
        facts, _ = executor.load(lambda progress: None)
        made.append((facts.digest, executor.model.layers[0].feed_forward.gate_up.weight.clone()))
    weight = made[0][1]
    assert made[0][0] == made[1][0] and torch.equal(weight, made[1][1])
    assert (weight != 0).all() and 0.015 < float(weight.std()) < 0.025
