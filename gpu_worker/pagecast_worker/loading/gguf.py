"""GGUF files: configuration from their metadata, tensors de-quantized one at a time.

Knows four things that the format does not say aloud: tensors are named in llama.cpp's way; the rows of q and k of a Llama are
stored permuted, because llama.cpp rotates neighbouring pairs where Hugging Face rotates halves; Gemma's norms are stored with their
1 added; and the experts of a layer are one tensor for each of their three matrices. All four are undone here.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.checkpoint import check_shape, file_sample
from pagecast_worker.loading.gguf_config import Metadata
from pagecast_worker.loading.gguf_tensors import StoredTensor, stored_tensors
from pagecast_worker.models.architecture import LLAMA_NAMES
from pagecast_worker.models.names import Names

_TOP = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER = {
    "attn_norm": "attention_norm", "ffn_norm": "feed_forward_norm", "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_feed_forward_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
    "ffn_gate_inp": "router", "ffn_gate_exps": "expert_gate", "ffn_up_exps": "expert_up", "ffn_down_exps": "expert_down",
}
"""llama.cpp's names of the parts of a model and of a layer (models.weights.Names); with .bias in place of .weight the part's bias."""
_STACKED = "{e}"
"""In a name: the tensor holds one matrix for every expert."""
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """One .gguf file. Raises LoadError on opening a file that is truncated, of an unknown architecture or without a needed field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata, entries = Metadata.with_tensors(path)
        self._metadata, self._stored = metadata, stored_tensors(path, entries)
        self._tensors = dict(_matrices(self._stored, metadata.family.names))
        self._permuted = metadata.family.gguf == "llama"
        embedding = self._tensors.get("model.embed_tokens.weight")
        kinds = {tensor.kind.name for tensor in self._stored} - {"F32"}
        self.config = metadata.configuration(
            None if embedding is None else embedding[0].dims[1], "lm_head.weight" not in self._tensors,
            tuple(self._values(_ROPE_FACTORS).float().flatten().tolist()) if _ROPE_FACTORS in self._tensors else (),
            "" if len(kinds - {"F16", "BF16"}) == 0 else "+".join(sorted(kinds)),
        )
        self.scheme = None  # its tensors are de-quantized one by one

    def names(self) -> Iterable[str]:
        return (name for name in self._tensors if name != _ROPE_FACTORS)

    def file_of(self, name: str) -> str:
        return str(self.path)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """De-quantized: float32, or float16 / bfloat16 where the file holds those."""
        if name not in self._tensors:
            raise LoadError(f"{self.path}: tensor {name} is missing")
        value = self._values(name)
        check_shape(str(self.path), name, tuple(value.shape), shape)
        for part, heads in (("q_proj", self.config.num_heads), ("k_proj", self.config.num_kv_heads)):
            if self._permuted and name.endswith(f"self_attn.{part}.weight"):
                return unpermute(value, heads)
        # Norms of 1 + weight are stored as that sum.
        return value.float() - self.config.norm_offset if self.config.norm_offset and name.endswith("norm.weight") else value

    def raw(self, name: str) -> Tensor:
        return self._values(name)

    def verify(self) -> None:
        """Alone in its file, it has no manifest."""

    def identity(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for tensor in sorted(self._stored, key=lambda tensor: tensor.name):
            name = huggingface_name(tensor.name, self._metadata.family.names)
            digest.update(f"{name} {list(tensor.dims)} {tensor.kind.name}\n".encode())
        digest.update(file_sample(self.path))
        return digest.hexdigest()

    def _values(self, name: str) -> Tensor:
        tensor, expert = self._tensors[name]
        shape = tuple(reversed(tensor.dims))
        kind, data = tensor.kind, tensor.data
        if expert is not None:
            shape, data = shape[1:], data[expert]
        if kind == gguf.GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(data)).view(torch.bfloat16).reshape(shape)
        try:
            values = gguf.quants.dequantize(data, kind)
        except (NotImplementedError, ValueError):
            raise LoadError(f"{self.path}: tensor {name} is of type {kind.name}, which cannot be de-quantized") from None
        return torch.from_numpy(np.array(values)).reshape(shape)

    def metadata(self, key: str) -> Any:
        """The value of a metadata field. Raises LoadError where it is missing."""
        return self._metadata.whole(key)


def _matrices(tensors: Iterable[StoredTensor], names: Names) -> Iterator[tuple[str, tuple[StoredTensor, int | None]]]:
    """Every tensor by its Hugging Face name, those that hold all experts once for each of them, with its number."""
    for tensor in tensors:
        name = huggingface_name(tensor.name, names)
        if _STACKED in name:
            yield from ((name.replace(_STACKED, str(expert)), (tensor, expert)) for expert in range(tensor.dims[-1]))
        else:
            yield name, (tensor, None)


def huggingface_name(name: str, names: Names = LLAMA_NAMES) -> str:
    """llama.cpp's tensor name in Hugging Face's words, by the family's table, {e} for the expert where a tensor holds all; unknown
    names stay as they are. Until 2024 files had a tensor for each expert, whose number came last."""
    if name in _TOP:
        return str(names[_TOP[name]])
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    stem, _, kind = rest.rpartition(".")
    stem, _, expert = stem.partition(".")
    part = _LAYER.get(f"{stem}_exps" if expert.isdecimal() else stem, "") + ("_bias" if kind == "bias" else "")
    if block == "blk" and part in names and kind in ("weight", "bias"):
        return f"{names['layer']}{names[part]}".format(i=index, e=expert or _STACKED)
    return name


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a q or k projection [heads * D, H] from interleaved pairs (2i, 2i + 1) back to halves (i, i + D / 2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
