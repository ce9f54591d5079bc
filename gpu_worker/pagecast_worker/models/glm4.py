"""GLM-4-0414: GLM-4, with what attention and feed-forward give normalised as well ("sandwich" norms)."""

from dataclasses import replace

from pagecast_worker.models import glm
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    return replace(glm.read(fields), post_norms=True)


NAMES = {
    **glm.NAMES, "post_attention_norm": "post_self_attn_layernorm.weight", "post_feed_forward_norm": "post_mlp_layernorm.weight",
}

ARCHITECTURE = Architecture("Glm4ForCausalLM", "glm4", read, NAMES)
