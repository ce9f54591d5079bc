"""GLM-4 (GLM team, 2024), the successor of ChatGLM: half of a head is rotated, in neighbouring pairs; gate and up are one tensor."""

from pagecast_worker.models.architecture import LLAMA_NAMES, Architecture, dense
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields
from pagecast_worker.models.names import Piece


def read(fields: Fields) -> ModelConfig:
    fields.default("partial_rotary_factor", 0.5)
    return dense(fields, attention_bias=fields.flag("attention_bias", True), interleaved=True, head_dim=fields.integer("head_dim", 128))


NAMES = {**LLAMA_NAMES, "gate": Piece("mlp.gate_up_proj.weight", 0, 2), "up": Piece("mlp.gate_up_proj.weight", 1, 2)}

ARCHITECTURE = Architecture("GlmForCausalLM", "glm", read, NAMES)
