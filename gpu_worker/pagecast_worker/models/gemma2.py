"""Gemma 2 (2024): norms of 1 + weight before and after each block, a window in every other layer, soft-capped scores and logits."""

from typing import Any

from pagecast_worker.models.architecture import LLAMA_NAMES, Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def shared(fields: Fields, sliding: list[bool], **own: Any) -> ModelConfig:
    """What Gemma 2 and 3 have in common. sliding: the layers with a window, where the file does not list them."""
    fields.default("tie_word_embeddings", True)
    fields.default("hidden_activation", "gelu_pytorch_tanh")
    fields.must_be("attention_bias", False)
    fields.must_be("use_bidirectional_attention", False)
    fields.get("hidden_act")  # older files carry it beside hidden_activation, which counts
    window = fields.integer("sliding_window", 4096)
    return dense(
        fields, activation="hidden_activation", norm_offset=1.0, post_norms=True, head_dim=fields.integer("head_dim", 256),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5, embedding_scale=fields.integer("hidden_size") ** 0.5,
        windows=fields.layer_windows(len(sliding), window, sliding), **own,
    )


def softcap(fields: Fields, name: str, default: float | None = None) -> float:
    """A soft-cap; null is none, and so is a missing one without a default."""
    if fields.get(name, default if name not in fields.values else None) is None:
        return 0.0
    return fields.number(name, default)


def read(fields: Fields) -> ModelConfig:
    sliding = [layer % 2 == 0 for layer in range(fields.integer("num_hidden_layers"))]
    return shared(
        fields, sliding, attention_softcap=softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(fields, "final_logit_softcapping", 30.0),
    )


NAMES = {
    **LLAMA_NAMES, "post_attention_norm": "post_attention_layernorm.weight", "feed_forward_norm": "pre_feedforward_layernorm.weight",
    "post_feed_forward_norm": "post_feedforward_layernorm.weight",
}

ARCHITECTURE = Architecture(
    "Gemma2ForCausalLM", "gemma2", read, NAMES, gguf="gemma2",
    example={"sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
)
