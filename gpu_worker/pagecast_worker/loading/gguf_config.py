"""A model's configuration from the metadata of a GGUF file. Most keys begin with the architecture's name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from pagecast_kernels.routing import Routing
from pagecast_wire.gguf_metadata import GgufError, TensorEntry, read_head
from pagecast_worker.executor import LoadError
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ExpertsConfig, ModelConfig, RopeScaling
from pagecast_worker.models.fields import mscale
from pagecast_worker.models.registry import architectures


class Metadata:
    """The metadata of one file. All methods raise LoadError naming file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        """values: by their whole keys."""
        self.path = path
        self._values = values
        self.family = self._family()

    @classmethod
    def of(cls, path: Path) -> "Metadata":
        """Reads the file's head."""
        return cls.with_tensors(path)[0]

    @classmethod
    def with_tensors(cls, path: Path) -> tuple["Metadata", list[TensorEntry]]:
        """Reads the file's head; what it says of the tensors too."""
        try:
            values, tensors = read_head(path)
        except (OSError, GgufError) as error:
            raise LoadError(f"{path}: not a readable GGUF file ({error.strerror if isinstance(error, OSError) else error})") from None
        return cls(path, values), tensors

    def _family(self) -> Architecture:
        """Mixtures may go by the name of the family that they are otherwise like: Mixtral's files say llama."""
        known = {(one.gguf, "router" in one.names): one for one in architectures().values() if one.gguf}
        name = self.whole("general.architecture")
        count = int(self.whole(f"{name}.expert_count", 0))
        if (name, count > 0) in known:
            return known[name, count > 0]
        if (name, count == 0) in known:
            known_as = "without" if count else "with"
            raise LoadError(f"{self.path}: field {name}.expert_count is {count}, and {name} is known {known_as} experts")
        names = ", ".join(sorted({name for name, _ in known}))
        raise LoadError(f"{self.path}: field general.architecture is {name!r}; known are {names}")

    def whole(self, key: str, default: Any = None) -> Any:
        """A value by its whole key. Raises LoadError where it is missing and there is no default."""
        value = self._values.get(key, default)
        if value is None:
            raise LoadError(f"{self.path}: field {key} is missing")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture."""
        return self.whole(f"{self.family.gguf}.{key}", default)

    def has(self, key: str) -> bool:
        return key in self._values

    def configuration(self, vocab_size: int | None, tied: bool, rope_factors: tuple[float, ...], quantization: str) -> ModelConfig:
        """vocab_size: rows of the embedding, if the file has one; quantization: how the file holds its matrices."""
        heads, hidden, layers = (int(self.get(key)) for key in ("attention.head_count", "embedding_length", "block_count"))
        head_dim = int(self.get("attention.key_length", hidden // heads))
        if int(self.get("rope.dimension_count", head_dim)) != head_dim:
            raise LoadError(f"{self.path}: field {self.family.gguf}.rope.dimension_count must be {head_dim}, the head size")
        scaling, longest = self._rope_scaling()
        common = {
            "architecture": self.family.name,
            "vocab_size": vocab_size if vocab_size is not None else int(self.get("vocab_size")),
            "hidden_size": hidden,
            "intermediate_size": int(self.get("feed_forward_length")),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": int(self.get("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position": longest,
            "rms_norm_eps": float(self.get("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": tied,
            "rope_scaling": scaling,
            "rope_factors": rope_factors,
            "eos_token_ids": self._eos_token_ids(),
            "quantization": quantization,
            "experts": self._experts(),
        }
        return ModelConfig(**common | self._own(layers, hidden, heads, head_dim))

    def _own(self, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
        """What the families have beyond Llama. Gemma's largest models scale scores by what its files do not state."""
        kind = self.family.gguf
        if kind == "qwen2":
            return {"attention_bias": True}
        if kind in ("qwen3", "qwen3moe"):
            return {"qk_norm": True}
        if not kind.startswith("gemma"):
            return {}
        window = int(self.get("attention.sliding_window", 4096))
        every, largest = (2, 46) if kind == "gemma2" else (6, 62)
        own: dict[str, Any] = {
            "norm_offset": 1.0, "post_norms": True, "activation": "gelu_tanh", "embedding_scale": hidden**0.5,
            "attention_scale": (hidden / heads if layers == largest else head_dim) ** -0.5,
            "windows": tuple(window if (layer + 1) % every else 0 for layer in range(layers)),
        }
        if kind == "gemma2":
            caps = (float(self.get(f"{name}_logit_softcapping", default)) for name, default in (("attn", 50.0), ("final", 30.0)))
            return own | dict(zip(("attention_softcap", "logit_softcap"), caps, strict=True))
        return own | {"qk_norm": True, "local_rope_theta": float(self.get("rope.freq_base_swa", 10000.0))}

    def _experts(self) -> ExpertsConfig | None:
        """What all layers have, with weights of a softmax, as llama.cpp computes these families."""
        count = int(self.get("expert_count", 0))
        if not count:
            return None
        for key, known in (("expert_gating_func", gguf.ExpertGatingFuncType.SOFTMAX.value), ("expert_shared_count", 0)):
            if int(self.get(key, known)) != known:
                raise LoadError(f"{self.path}: field {self.family.gguf}.{key} must be {known}, got {self.get(key)}")
        routing = Routing(
            int(self.get("expert_used_count")), renormalise=bool(self.get("expert_weights_norm", True)),
            scale=float(self.get("expert_weights_scale", 0.0)) or 1.0,
        )
        if not 0 < routing.chosen <= count:
            raise LoadError(f"{self.path}: field {self.family.gguf}.expert_used_count must be 1 to {count}, got {routing.chosen}")
        return ExpertsConfig(routing, count, int(self.get("expert_feed_forward_length", int(self.get("feed_forward_length")))))

    def _rope_scaling(self) -> tuple[RopeScaling, int]:
        """The scaling, and the longest sequence in tokens, which files state after scaling."""
        longest = int(self.get("context_length"))
        kind = self.get("rope.scaling.type", "none")
        if kind == "none":
            return RopeScaling(), longest
        factor = float(self.get("rope.scaling.factor"))
        if kind == "linear":
            return RopeScaling("linear", factor), longest
        if kind == "yarn":
            original = int(self.get("rope.scaling.original_context_length", longest))
            scaling = RopeScaling("yarn", factor, original_max_position=original, attention_factor=mscale(factor, 1.0))
            return scaling, max(longest, int(original * factor))
        raise LoadError(f"{self.path}: field {self.family.gguf}.rope.scaling.type is {kind!r}; known are none, linear and yarn")

    def _eos_token_ids(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        return tuple(sorted({int(self.whole(key)) for key in keys if self.has(key)}))
