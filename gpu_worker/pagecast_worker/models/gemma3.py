"""Gemma 3's text model (2025): Gemma 2 without soft-caps, q and k normalised, layers with a window rotated by a base of their own."""

from dataclasses import replace

from pagecast_worker.models import gemma2
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    every = fields.integer("sliding_window_pattern", 6)
    fields.get("_sliding_window_pattern")
    sliding = [(layer + 1) % every != 0 for layer in range(fields.integer("num_hidden_layers"))]
    whole = fields.rope("full_attention", 1e6)
    local = fields.get("rope_parameters", {}).get("sliding_attention") or {"rope_theta": fields.number("rope_local_base_freq", 1e4)}
    config = gemma2.shared(
        fields, sliding, qk_norm=True, rope=whole, local_rope_theta=fields.theta(local),
        attention_softcap=gemma2.softcap(fields, "attn_logit_softcapping"), logit_softcap=gemma2.softcap(fields, "final_logit_softcapping"),
    )
    # Its files state the length after scaling.
    return replace(config, max_position=fields.integer("max_position_embeddings"))


ARCHITECTURE = Architecture(
    "Gemma3ForCausalLM", "gemma3_text", read, gemma2.NAMES, gguf="gemma3",
    example={
        "num_hidden_layers": 3, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
)
