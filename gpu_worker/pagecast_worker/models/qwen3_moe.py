"""Qwen3-MoE (Yang et al. 2025): Qwen3, with many small experts in place of the feed-forward block."""

from dataclasses import replace

from pagecast_kernels.routing import Routing
from pagecast_worker.models import qwen3
from pagecast_worker.models.architecture import LLAMA_NAMES, Architecture
from pagecast_worker.models.config import ExpertsConfig, ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.must_be("use_sliding_window", False)
    count = fields.integer("num_experts", fields.get("num_local_experts"))
    experts = ExpertsConfig(
        Routing(fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob")), count,
        fields.integer("moe_intermediate_size"), step=fields.integer("decoder_sparse_step", 1),
        dense_layers=fields.integers("mlp_only_layers"),
    )
    return replace(qwen3.read(fields), experts=experts)


NAMES = {
    **LLAMA_NAMES, "router": "mlp.gate.weight", "expert_gate": "mlp.experts.{e}.gate_proj.weight",
    "expert_up": "mlp.experts.{e}.up_proj.weight", "expert_down": "mlp.experts.{e}.down_proj.weight",
}

ARCHITECTURE = Architecture(
    "Qwen3MoeForCausalLM", "qwen3_moe", read, NAMES,
    example={
        "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    gguf="qwen3moe",
)
