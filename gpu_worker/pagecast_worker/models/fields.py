"""Reads config.json by an allow-list: what an architecture asks for is allowed, everything else that could matter is refused."""

import math
from pathlib import Path
from typing import Any

from pagecast_worker.executor import LoadError
from pagecast_worker.models.config import RopeScaling

_NO_EFFECT = {
    "architectures", "model_type", "attention_dropout", "bos_token_id", "pad_token_id", "unk_token_id", "eos_token_id", "dtype",
    "torch_dtype", "initializer_range", "transformers_version", "use_cache", "cache_implementation", "is_llama_config", "_name_or_path",
    "transformers.js_config", "output_attentions", "output_hidden_states", "return_dict", "_attn_implementation_autoset",
    "hidden_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop", "auto_map", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "chunk_size_feed_forward", "problem_type", "id2label", "label2id", "is_encoder_decoder", "tokenizer_class",
    "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "keys_to_ignore_at_inference",
}
"""Fields without influence on what a served model computes: training, bookkeeping, and code that is never run."""


class Fields:
    """The values of one config.json. Every read marks its field as understood; `finish` refuses what nobody read.

    All methods raise LoadError naming file and field.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it is; default where it is missing or null."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def default(self, name: str, value: Any) -> None:
        """What a field is where it is missing or null."""
        if self.values.get(name) is None:
            self.values[name] = value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise LoadError(f"{self.path}: field {name} must be {what}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return self._number(self.values, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.path}: field {name} must be true or false, got {value!r}")
        return value

    def nested(self, name: str) -> "Fields":
        """The fields of an object within this one, which has its own `finish`."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise LoadError(f"{self.path}: field {name} must be an object, got {value!r}")
        return Fields(self.path, value | {"architectures": self.values["architectures"]})

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least 0; empty where it is missing."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
            raise LoadError(f"{self.path}: field {name} must be a list of integers, got {value!r}")
        return tuple(value)

    def must_be(self, name: str, *allowed: Any) -> Any:
        """A value that may be only one of these; missing or null is the first of them."""
        value = self.get(name, allowed[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise LoadError(f"{self.path}: field {name} must be {allowed[0]!r}, got {value!r}")
        return value

    def layer_windows(self, num_layers: int, window: int, default: list[bool]) -> tuple[int, ...]:
        """Windows by layer. default: whether a layer has one, where the file has no layer_types."""
        kinds = self.get("layer_types")
        if kinds is None:
            chosen = default
        elif isinstance(kinds, list) and len(kinds) == num_layers and set(kinds) <= {"full_attention", "sliding_attention"}:
            chosen = [kind == "sliding_attention" for kind in kinds]
        else:
            raise LoadError(f"{self.path}: field layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
        if not any(chosen):
            return ()
        if window < 1:
            raise LoadError(f"{self.path}: field sliding_window must be a positive integer, got {window}")
        return tuple(window if sliding else 0 for sliding in chosen)

    def rope(self, kind_of_layer: str | None = None, default_theta: float = 10000.0) -> dict[str, Any]:
        """Rotary parameters of all layers, or of one kind of layer: rope_parameters (newer files), or rope_theta and rope_scaling."""
        newer = self.get("rope_parameters", {})
        if kind_of_layer is not None and kind_of_layer in newer:
            newer = newer[kind_of_layer] or {}
        found = newer or self.get("rope_scaling", {})
        if not isinstance(found, dict):
            raise LoadError(f"{self.path}: field rope_scaling must be an object, got {found!r}")
        return {"rope_theta": self.get("rope_theta", default_theta)} | found

    def theta(self, rope: dict[str, Any]) -> float:
        return self._number(rope, "rope_theta", None)

    def rope_scaling(self, rope: dict[str, Any], max_position: int) -> tuple[RopeScaling, int]:
        """The scaling, and the longest sequence that it makes possible, in tokens."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return RopeScaling(), max_position
        if kind in ("linear", "dynamic"):
            factor = self._number(rope, "factor", None)
            known = {"original_max_position": max_position} if kind == "dynamic" else {}
            return RopeScaling(kind, factor, **known), int(max_position * factor)
        if kind == "llama3":
            factor, low, high = (self._number(rope, name, None) for name in ("factor", "low_freq_factor", "high_freq_factor"))
            return RopeScaling("llama3", factor, low, high, self._original(rope, None)), max_position
        if kind == "yarn":
            return self._yarn(rope, max_position)
        raise LoadError(f"{self.path}: field rope_type is {kind!r}; known are default, linear, dynamic, yarn and llama3")

    def _yarn(self, rope: dict[str, Any], max_position: int) -> tuple[RopeScaling, int]:
        original = self._original(rope, max_position)
        factor = self._number(rope, "factor", max_position / original)
        wanted, all_dims = (self._number(rope, name, 0.0, least=0.0) for name in ("mscale", "mscale_all_dim"))
        default = mscale(factor, wanted) / mscale(factor, all_dims) if wanted and all_dims else mscale(factor, 1.0)
        scaling = RopeScaling(
            "yarn", factor, original_max_position=original, beta_fast=self._number(rope, "beta_fast", 32.0),
            beta_slow=self._number(rope, "beta_slow", 1.0), attention_factor=self._number(rope, "attention_factor", default),
            truncate=bool(rope.get("truncate", True)),
        )
        return scaling, max(int(original * factor), max_position)

    def _original(self, rope: dict[str, Any], default: int | None) -> int:
        value = rope.get("original_max_position_embeddings", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.path}: field original_max_position_embeddings must be a positive integer, got {value!r}")
        return value

    def _number(self, values: dict[str, Any], name: str, default: float | None, least: float | None = None) -> float:
        self._read.add(name)
        value = values.get(name)
        value = default if value is None else value
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or (value <= 0 if least is None else value < least):
            raise LoadError(f"{self.path}: field {name} must be a number above 0, got {value!r}")
        return float(value)

    def finish(self) -> None:
        """Refuse what was neither read nor is known to be without effect."""
        for name in sorted(self.values.keys() - self._read - _NO_EFFECT):
            if self.values[name] is not None:
                raise LoadError(f"{self.path}: field {name} is not known, so the model might compute something else")


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature for contexts stretched by factor (Peng et al. 2023, as in DeepSeek-V2): 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
