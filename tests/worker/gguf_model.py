"""Models as .gguf files: the tiny one, and any family's."""

import re

import gguf
import torch
from worker.tiny_model import TINY, weights

from pagecast_worker.models.registry import architectures

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """How llama.cpp stores q and k: row i + j * D / 2 of a head goes to row 2 i + j."""
    rows = weight.shape[0]
    size = rows // heads
    order = [head * size + j * size // 2 + i for head in range(heads) for i in range(size // 2) for j in range(2)]
    return weight[order]


def write(path, kind=gguf.GGMLQuantizationType.F32, leave_out=(), architecture="llama", tokenizer=None, others=None):
    """The tiny model as a GGUF file, its matrices stored as `kind`. tokenizer: what tells the writer of one, with its end tokens.

    others: bytes uint8 [rows, bytes] of tensors beside the model's, by the type that they are of."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(TINY["max_position_embeddings"])
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(20000.0)
    if tokenizer is None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(4)
    else:
        tokenizer(writer)
    for name, tensor in weights().items():
        if name in leave_out:
            continue
        for part, heads in (("q_proj", TINY["num_attention_heads"]), ("k_proj", TINY["num_key_value_heads"])):
            if part in name:
                tensor = permuted(tensor, heads)
        stem = name.removesuffix(".weight").split(".", 3)
        short = NAMES.get(name) or f"blk.{stem[2]}.{PARTS[stem[3]]}.weight"
        values = tensor.float().numpy()
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        if stored == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(short, values)
        else:
            writer.add_tensor(short, gguf.quants.quantize(values, stored), raw_dtype=stored)
    for other, data in (others or {}).items():
        writer.add_tensor(f"other.{other.name}", data, raw_dtype=other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_stacked_experts(state):
    """A checkpoint's tensors, with one for all experts of a layer in place of one for each."""
    experts = re.compile(r"(.*\.experts)\.(\d+)(\.\w+\.weight)")
    found = {key: experts.fullmatch(key) for key in state}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, match in found.items():
        if match:
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = state[key]
    plain = {key: tensor for key, tensor in state.items() if not found[key]}
    return plain | {key: torch.stack([parts[number] for number in sorted(parts)]) for key, parts in stacks.items()}


def describe(writer, name, config, fields):
    """The metadata that a family's files have."""
    kind = architectures()[name].gguf
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters["full_attention"] if kind == "gemma3" else config.rope_parameters)["rope_theta"])
    if kind.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if "router" in architectures()[name].names:
        writer.add_expert_count(fields.pop("expert_count", getattr(config, "num_local_experts", None) or config.num_experts))
        writer.add_expert_used_count(fields.pop("expert_used_count", config.num_experts_per_tok))
        if name == "Qwen3MoeForCausalLM":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        for field, value in fields.items():
            getattr(writer, f"add_{field}")(value)


def write_family_gguf(path, name, config, state, kind=gguf.GGMLQuantizationType.F32, split=False, architecture=None, **fields):
    """A family's checkpoint as a .gguf file, with the names that the gguf library itself gives its tensors.

    kind: of experts. split: a tensor for each expert, as files had until 2024. architecture: in place of the family's. fields: what
    is told of the experts.
    """
    family = architectures()[name]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.gguf.upper()), config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture or family.gguf)
    describe(writer, name, config, fields)
    for key, tensor in with_stacked_experts(state).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if family.gguf == "llama" and part in key:
                tensor = permuted(tensor, heads)
        tensor = tensor + 1 if family.gguf.startswith("gemma") and "norm" in key else tensor
        short, values = names.get_name(key, try_suffixes=(".weight", ".bias")), tensor.float().numpy()
        if split and ".experts." in key:
            for number, own in enumerate(values):
                writer.add_tensor(short.replace("_exps.", f".{number}."), own)
        elif ".experts." in key and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(short, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(short, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
