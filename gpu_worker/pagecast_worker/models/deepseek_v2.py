"""DeepSeek-V2 (2024): latent attention, and experts beside some that see every token; of the larger model, only within the best groups."""

from dataclasses import replace

from pagecast_kernels.routing import Routing
from pagecast_worker.executor import LoadError
from pagecast_worker.models.architecture import LLAMA_NAMES, Architecture, dense
from pagecast_worker.models.config import ExpertsConfig, LatentConfig, ModelConfig
from pagecast_worker.models.fields import Fields, mscale


def latent(fields: Fields) -> ModelConfig:
    """Everything but the experts."""
    shape = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512), query_rank=fields.integer("q_lora_rank", 0, least=0),
        nope_dim=fields.integer("qk_nope_head_dim", 128), rope_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
    )
    for name, value in (("kv_lora_rank", shape.rank), ("qk_rope_head_dim", shape.rope_dim)):
        if value & value - 1 or value < 16:
            raise LoadError(f"{fields.path}: field {name} must be a power of two of at least 16, got {value}")
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        fields.get(name)  # follow from others, and older files state them differently
    head_dim, bias = shape.nope_dim + shape.rope_dim, fields.flag("attention_bias")
    config = dense(fields, head_dim=head_dim, latent=shape, interleaved=True, attention_bias=bias, output_bias=bias)
    return replace(config, num_kv_heads=1, attention_scale=head_dim**-0.5 * temperature(fields) ** 2)


def temperature(fields: Fields) -> float:
    """Scores of a stretched context are sharpened by its square."""
    rope = fields.rope()
    weight = rope.get("mscale_all_dim") or 0.0
    stretched = rope.get("rope_type", rope.get("type", "default")) != "default"
    return mscale(float(rope["factor"]), float(weight)) if stretched and weight else 1.0


def read(fields: Fields) -> ModelConfig:
    fields.must_be("moe_layer_freq", 1)
    fields.must_be("mlp_bias", False)
    fields.must_be("pretraining_tp", 1)
    fields.must_be("norm_topk_prob", False)
    fields.must_be("scoring_func", "softmax")
    grouped = fields.must_be("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups = (fields.integer("n_group"), fields.integer("topk_group")) if grouped else (1, 1)
    fields.get("n_group"), fields.get("topk_group")
    size = fields.integer("moe_intermediate_size")
    routing = Routing(
        fields.integer("num_experts_per_tok"), renormalise=False, scale=fields.number("routed_scaling_factor", 1.0), groups=groups[0],
        chosen_groups=groups[1],
    )
    experts = ExpertsConfig(
        routing, fields.integer("n_routed_experts", 64), size, fields.integer("n_shared_experts", 2, least=0) * size,
        fields.integer("first_k_dense_replace", 0, least=0),
    )
    return replace(latent(fields), experts=experts)


NAMES = {
    **LLAMA_NAMES, "q_compressed": "self_attn.q_b_proj.weight", "q_down": "self_attn.q_a_proj.weight",
    "q_down_bias": "self_attn.q_a_proj.bias",
    "q_down_norm": "self_attn.q_a_layernorm.weight", "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_down_bias": "self_attn.kv_a_proj_with_mqa.bias", "kv_down_norm": "self_attn.kv_a_layernorm.weight",
    "kv_up": "self_attn.kv_b_proj.weight", "router": "mlp.gate.weight", "router_bias": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{e}.gate_proj.weight", "expert_up": "mlp.experts.{e}.up_proj.weight",
    "expert_down": "mlp.experts.{e}.down_proj.weight", "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight", "shared_down": "mlp.shared_experts.down_proj.weight",
}

SMALL = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "head_dim": None,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

ARCHITECTURE = Architecture(
    "DeepseekV2ForCausalLM", "deepseek_v2", read, NAMES,
    example={
        **SMALL, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
            "mscale_all_dim": 0.7, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
)
