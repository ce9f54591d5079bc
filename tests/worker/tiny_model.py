"""Model folders small enough for any test: a config.json, and weights where they are wanted."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from worker.smollm2 import model_file

from pagecast_worker.config import WorkerConfig
from pagecast_worker.torch_executor import TorchExecutor

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}


def write_config(folder: Path, **changes: object) -> Path:
    """config.json of the tiny model with fields changed; None removes one."""
    values = {name: value for name, value in (TINY | changes).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """bfloat16 weights of the tiny model by their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, query, key = TINY["hidden_size"], TINY["intermediate_size"], 128, 64

    def normal(*shape: int) -> torch.Tensor:
        centre = 1.0 if len(shape) == 1 else 0.0
        return torch.normal(centre, 0.08, shape, generator=generator).bfloat16()

    made = {name: normal(TINY["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    made["model.norm.weight"] = normal(hidden)
    for index in range(TINY["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        for part, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden), "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }.items():
            made[f"{prefix}{part}.weight"] = normal(*shape)
    return made


def write_model(folder: Path, shards: int = 2, seed: int = 0, **changes: object) -> Path:
    """A whole model folder, its tensors dealt out over `shards` files with an index."""
    write_config(folder, **changes)
    tensors = weights(seed)
    names = sorted(tensors)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        where |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes for the tiny model, in its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place + 3 for place, letter in enumerate(alphabet)} | {"<s>": 1, "</s>": 2}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    return folder


@contextmanager
def wide_executor(folder: Path, vocab_size: int, end: int) -> Iterator[TorchExecutor]:
    """Made-up weights with the vocabulary of SmolLM2, loaded: logits that want nothing."""
    torch.set_num_threads(1)
    shape = write_config(folder, vocab_size=vocab_size, hidden_size=64, intermediate_size=64, eos_token_id=end)
    config = WorkerConfig(
        run_dir="/unused", model=str(model_file()), random_weights=str(shape), device="cpu", dtype="float32", num_blocks=200,
        max_num_seqs=16,
    )  # fmt: skip
    made = TorchExecutor(config)
    made.load(lambda progress: None)
    yield made
    made.close()


def load_tiny(folder, num_blocks: int) -> TorchExecutor:
    """A float32 CPU executor of the tiny model, whose checkpoint is written into `folder`."""
    config = WorkerConfig(
        run_dir="/unused", model=str(write_model(folder)), device="cpu", dtype="float32", num_blocks=num_blocks, max_num_seqs=8
    )
    executor = TorchExecutor(config)
    executor.load(lambda progress: None)
    return executor
