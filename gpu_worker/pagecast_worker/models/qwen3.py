"""Qwen3 (Yang et al. 2025): Llama, with every head of q and k normalised before rotation."""

from pagecast_worker.models.architecture import Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields
from pagecast_worker.models.qwen2 import windows


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    head_dim = fields.integer("head_dim", 128)
    return dense(fields, qk_norm=True, attention_bias=bias, output_bias=bias, windows=windows(fields), head_dim=head_dim)


ARCHITECTURE = Architecture("Qwen3ForCausalLM", "qwen3", read, gguf="qwen3", example={"head_dim": 32})
