"""Gemma 3 from 4B on (2025): Gemma 3's text model in a file that also holds a vision tower, which is left where it is."""

from pagecast_worker.models import gemma2, gemma3
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields

DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
}
"""What its files leave out where they agree."""
_VISION = (
    "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id",
    "mm_tokens_per_image",
)


def read(fields: Fields) -> ModelConfig:
    for name in _VISION:
        fields.get(name)
    text = fields.nested("text_config")
    for name, value in DEFAULTS.items():
        text.default(name, value)
    text.default("tie_word_embeddings", fields.flag("tie_word_embeddings", True))
    config = gemma3.read(text)
    text.finish()
    return config


NAMES = {
    **gemma2.NAMES, "embedding": "language_model.model.embed_tokens.weight", "head": "language_model.lm_head.weight",
    "norm": "language_model.model.norm.weight", "layer": "language_model.model.layers.{i}.",
}

ARCHITECTURE = Architecture(
    "Gemma3ForConditionalGeneration", "gemma3", read, NAMES, ignored=("vision_tower.", "multi_modal_projector."),
    example={
        "text_config": dict(gemma3.ARCHITECTURE.example),
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4, "image_token_index": 150,
    },
)
