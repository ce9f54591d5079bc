"""What a model file declares: how its config.json becomes a ModelConfig, and which checkpoint tensor is which part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields
from pagecast_worker.models.names import Names

LLAMA_NAMES: Names = {
    "embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight", "layer": "model.layers.{i}.",
    "attention_norm": "input_layernorm.weight", "feed_forward_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight", "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}
"""The names that most families share. A part that a configuration does not ask for is not looked up."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family. name: as config.json's architectures spells it. read: its fields as a configuration, every field that matters.

    example: fields of a small model of the family, next to `SMALL`, for tests that make one. extra_layers: its checkpoints may hold
    layers after the last, for drafting, which nothing reads. ignored: beginnings of names of what is not served. gguf: the name that
    .gguf files give the family, if they hold it; one with experts and one without may share it. reference: the class of transformers
    that computes the same, where it has none of this name.
    """

    name: str
    model_type: str
    read: Callable[[Fields], ModelConfig]
    names: Names = field(default_factory=lambda: LLAMA_NAMES)
    example: Mapping[str, Any] = field(default_factory=dict)
    extra_layers: bool = False
    ignored: tuple[str, ...] = ()
    gguf: str = ""
    reference: str = ""


SMALL: Mapping[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Fields of a model small enough for any test, shared by the examples."""


def dense(fields: Fields, *, activation: str = "hidden_act", **own: Any) -> ModelConfig:
    """The fields that all families share. activation: the field that names it; own: what the family knows better."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    rope = own.pop("rope", None) or fields.rope()
    scaling, longest = fields.rope_scaling(rope, fields.integer("max_position_embeddings"))
    head_dim = own.pop("head_dim", None) or fields.integer("head_dim", hidden // heads)
    rotary_dim = int(head_dim * float(rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        fields.must_be("partial_rotary_factor", 1.0)
    values = {
        "architecture": str(fields.values["architectures"][0]),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position": longest,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": fields.theta(rope),
        "rope_scaling": scaling,
        "rotary_dim": 0 if rotary_dim == head_dim else rotary_dim,
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "activation": _ACTIVATIONS[fields.must_be(activation, *_ACTIVATIONS)],
    }
    return ModelConfig(**values | own)
