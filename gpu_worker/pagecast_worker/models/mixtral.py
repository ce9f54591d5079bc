"""Mixtral (Jiang et al. 2024): Mistral, with eight experts, two of which see a token."""

from dataclasses import replace

from pagecast_kernels.routing import Routing
from pagecast_worker.models import mistral
from pagecast_worker.models.architecture import LLAMA_NAMES, Architecture
from pagecast_worker.models.config import ExpertsConfig, ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    routing = Routing(fields.integer("num_experts_per_tok", 2))
    experts = ExpertsConfig(routing, fields.integer("num_local_experts", 8), fields.integer("intermediate_size"))
    return replace(mistral.read(fields), experts=experts)


NAMES = {
    **LLAMA_NAMES, "router": "block_sparse_moe.gate.weight", "expert_gate": "block_sparse_moe.experts.{e}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{e}.w3.weight", "expert_down": "block_sparse_moe.experts.{e}.w2.weight",
}

ARCHITECTURE = Architecture(
    "MixtralForCausalLM", "mixtral", read, NAMES, example={"num_local_experts": 4, "num_experts_per_tok": 2}, gguf="llama"
)
