"""DeepSeek-V3 and R1 (2024): DeepSeek-V2 with compressed queries and experts scored by sigmoids, chosen with a correction each."""

from dataclasses import replace

from pagecast_kernels.routing import Routing
from pagecast_worker.models import deepseek_v2
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ExpertsConfig, ModelConfig
from pagecast_worker.models.fields import Fields


def read(fields: Fields) -> ModelConfig:
    fields.must_be("moe_layer_freq", 1)
    fields.must_be("pretraining_tp", 1)
    fields.must_be("topk_method", "noaux_tc")
    fields.must_be("scoring_func", "sigmoid")
    size = fields.integer("moe_intermediate_size")
    routing = Routing(
        fields.integer("num_experts_per_tok", 8), sigmoid=True, renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5), groups=fields.integer("n_group", 8),
        chosen_groups=fields.integer("topk_group", 4), group_top=2,
    )
    experts = ExpertsConfig(
        routing, fields.integer("n_routed_experts", 256), size, fields.integer("n_shared_experts", 1, least=0) * size,
        fields.integer("first_k_dense_replace", 3, least=0), bias=True,
    )
    return replace(deepseek_v2.latent(fields), experts=experts, interleaved=fields.flag("rope_interleave", True))


ARCHITECTURE = Architecture(
    "DeepseekV3ForCausalLM", "deepseek_v3", read, deepseek_v2.NAMES, extra_layers=True,
    example={
        **deepseek_v2.SMALL, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_mtp_layers": 0,
    },
)
