"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama, with biases on q, k and v, and a window in the upper layers of some."""

from pagecast_worker.models.architecture import Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def windows(fields: Fields) -> tuple[int, ...]:
    """Layers from max_window_layers on have the window, where it is in use at all."""
    layers, window = fields.integer("num_hidden_layers"), fields.integer("sliding_window", 0, least=0)
    first = fields.integer("max_window_layers", 28, least=0)
    if not fields.flag("use_sliding_window"):
        fields.get("layer_types")
        return ()
    return fields.layer_windows(layers, window, [layer >= first for layer in range(layers)])


def read(fields: Fields) -> ModelConfig:
    return dense(fields, attention_bias=True, windows=windows(fields))


ARCHITECTURE = Architecture(
    "Qwen2ForCausalLM", "qwen2", read, gguf="qwen2",
    example={
        "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": True,
        "max_position_embeddings": 48,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    },
)
