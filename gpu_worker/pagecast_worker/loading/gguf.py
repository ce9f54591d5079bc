"""GGUF files: configuration from their metadata, tensors de-quantized one at a time.

Knows two things that the format does not say aloud: tensors are named in llama.cpp's way, and the rows of q and k of a Llama are
stored permuted, because llama.cpp rotates neighbouring pairs where Hugging Face rotates halves. Both are undone here.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.checkpoint import check_shape, file_sample
from pagecast_worker.models.config import ModelConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    """One .gguf file. Raises LoadError on opening a file that is truncated, of an unknown architecture or without a needed field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise LoadError(f"{path}: not a readable GGUF file ({type(error).__name__})") from None
        self._tensors = {huggingface_name(t.name): t for t in self._reader.tensors}
        self.config = self._configuration()
        self.scheme = None  # its tensors are de-quantized one by one

    def names(self) -> Iterable[str]:
        return (name for name in self._tensors if name != "rope_freqs.weight")

    def file_of(self, name: str) -> str:
        return str(self.path)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """De-quantized: float32, or float16 / bfloat16 where the file holds those."""
        if name not in self._tensors:
            raise LoadError(f"{self.path}: tensor {name} is missing")
        value = self._values(name)
        check_shape(str(self.path), name, tuple(value.shape), shape)
        for part, heads in (("q_proj", self.config.num_heads), ("k_proj", self.config.num_kv_heads)):
            if name.endswith(f"self_attn.{part}.weight"):
                return unpermute(value, heads)
        return value

    def raw(self, name: str) -> Tensor:
        return self._values(name)

    def identity(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.shape.tolist()} {tensor.tensor_type.name}\n".encode())
        digest.update(file_sample(self.path))
        return digest.hexdigest()

    def _values(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        kind = tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(shape)
        try:
            values = gguf.quants.dequantize(tensor.data, kind)
        except (NotImplementedError, ValueError):
            raise LoadError(f"{self.path}: tensor {name} is of type {kind.name}, which cannot be de-quantized") from None
        return torch.from_numpy(np.array(values)).reshape(shape)

    def metadata(self, key: str) -> Any:
        """The value of a metadata field. Raises LoadError where it is missing."""
        return self._field(key)

    def _field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata field. Raises LoadError where it is missing and there is no default."""
        field = self._reader.fields.get(key)
        if field is None and default is None:
            raise LoadError(f"{self.path}: field {key} is missing")
        return default if field is None else field.contents()

    def _configuration(self) -> ModelConfig:
        name = self._field("general.architecture")
        if name not in ARCHITECTURES:
            raise LoadError(f"{self.path}: field general.architecture is {name!r}; known are {', '.join(ARCHITECTURES)}")
        heads, hidden = int(self._field(f"{name}.attention.head_count")), int(self._field(f"{name}.embedding_length"))
        head_dim = int(self._field(f"{name}.attention.key_length", hidden // heads))
        if int(self._field(f"{name}.rope.dimension_count", head_dim)) != head_dim:
            raise LoadError(f"{self.path}: field {name}.rope.dimension_count must be {head_dim}, the head size")
        if int(self._field(f"{name}.expert_count", 0) or 0):
            raise LoadError(f"{self.path}: field {name}.expert_count names experts, and only dense models are known")
        embedding = self._tensors.get("model.embed_tokens.weight")
        kinds = {t.tensor_type.name for t in self._tensors.values()} - {"F32"}
        factors = self._values("rope_freqs.weight").float().flatten().tolist() if "rope_freqs.weight" in self._tensors else ()
        return ModelConfig(
            architecture=ARCHITECTURES[name],
            vocab_size=int(embedding.shape[1]) if embedding is not None else int(self._field(f"{name}.vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(self._field(f"{name}.feed_forward_length")),
            num_layers=int(self._field(f"{name}.block_count")),
            num_heads=heads,
            num_kv_heads=int(self._field(f"{name}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            max_position=int(self._field(f"{name}.context_length")),
            rms_norm_eps=float(self._field(f"{name}.attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._field(f"{name}.rope.freq_base", 10000.0)),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            rope_scaling=self._rope_scaling(name),
            rope_factors=tuple(factors),
            eos_token_ids=self._eos_token_ids(),
            quantization="" if len(kinds - {"F16", "BF16"}) == 0 else "+".join(sorted(kinds)),
        )

    def _rope_scaling(self, name: str) -> RopeScaling:
        kind = self._field(f"{name}.rope.scaling.type", "none")
        if kind == "linear":
            return RopeScaling("linear", float(self._field(f"{name}.rope.scaling.factor")))
        if kind != "none":
            raise LoadError(f"{self.path}: field {name}.rope.scaling.type is {kind!r}; known are none and linear")
        return RopeScaling()

    def _eos_token_ids(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        return tuple(sorted({int(self._field(key)) for key in keys if key in self._reader.fields}))


def huggingface_name(name: str) -> str:
    """llama.cpp's tensor name in Hugging Face's words; unknown names stay as they are."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    stem, _, kind = rest.rpartition(".")
    if block == "blk" and stem in _LAYER:
        return f"model.layers.{index}.{_LAYER[stem]}.{kind}"
    return name


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a q or k projection [heads * D, H] from interleaved pairs (2i, 2i + 1) back to halves (i, i + D / 2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
