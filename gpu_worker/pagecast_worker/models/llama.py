"""Llama 2, 3 and what is built like them (Touvron et al. 2023): pre-norm, grouped-query attention, rotary positions, SwiGLU."""

from pagecast_worker.models.architecture import Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.must_be("mlp_bias", False)
    fields.must_be("pretraining_tp", 1)
    fields.must_be("rope_interleaved", False)
    bias = fields.flag("attention_bias")
    return dense(fields, attention_bias=bias, output_bias=bias)


ARCHITECTURE = Architecture(
    "LlamaForCausalLM", "llama", read, gguf="llama",
    example={
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
)
