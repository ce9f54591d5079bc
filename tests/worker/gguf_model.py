"""The tiny model as a .gguf file."""

import gguf
import torch
from worker.tiny_model import TINY, weights

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


def write(path, kind=gguf.GGMLQuantizationType.F32, leave_out=(), architecture="llama", tokenizer=None):
    """The tiny model as a GGUF file, its matrices stored as `kind`. tokenizer: what tells the writer of one, with its end tokens."""
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
