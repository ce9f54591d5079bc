"""config.json and generation_config.json of a Hugging Face folder: only fields that are known and understood are let through."""

import json
from pathlib import Path
from typing import Any

from pagecast_worker.executor import LoadError
from pagecast_worker.models.config import ModelConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM",)

_MUST_BE = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, 1, None),
}
"""Fields that change what the model computes, and the values under which this code computes the same."""

_USED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "eos_token_id",
}
_NO_EFFECT = {
    "attention_dropout", "bos_token_id", "pad_token_id", "unk_token_id", "dtype", "torch_dtype", "initializer_range",
    "transformers_version", "use_cache", "is_llama_config", "_name_or_path", "transformers.js_config", "output_attentions",
    "output_hidden_states", "return_dict", "_attn_implementation_autoset", "hidden_dropout", "embedding_dropout", "resid_pdrop",
}


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder. Raises LoadError naming file and field."""
    path = folder / "config.json"
    values = _read_json(path)
    _check_fields(path, values)
    heads, hidden = _integer(path, values, "num_attention_heads"), _integer(path, values, "hidden_size")
    theta, scaling = _rope(path, values)
    return ModelConfig(
        architecture=str(values["architectures"][0]),
        vocab_size=_integer(path, values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(path, values, "intermediate_size"),
        num_layers=_integer(path, values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(path, values, "num_key_value_heads", heads),
        head_dim=_integer(path, values, "head_dim", hidden // heads),
        max_position=_integer(path, values, "max_position_embeddings"),
        rms_norm_eps=_number(path, values, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        rope_scaling=scaling,
        eos_token_ids=_eos_token_ids(folder, values),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise LoadError(f"{path}: not a JSON file") from None
    if not isinstance(values, dict):
        raise LoadError(f"{path}: not a JSON object")
    return values


def _check_fields(path: Path, values: dict[str, Any]) -> None:
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise LoadError(f"{path}: field architectures is {architectures!r}; known are {', '.join(ARCHITECTURES)}")
    for field, allowed in _MUST_BE.items():
        if field in values and values[field] not in allowed:
            raise LoadError(f"{path}: field {field} must be {allowed[0]!r}, got {values[field]!r}")
    for field in sorted(values.keys() - _USED - _NO_EFFECT - _MUST_BE.keys()):
        raise LoadError(f"{path}: field {field} is not known, so the model might compute something else")


def _integer(path: Path, values: dict[str, Any], field: str, default: int | None = None) -> int:
    value = values.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{path}: field {field} must be a positive integer, got {value!r}")
    return value


def _number(path: Path, values: dict[str, Any], field: str, default: float | None = None) -> float:
    value = values.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise LoadError(f"{path}: field {field} must be a number above 0, got {value!r}")
    return float(value)


def _rope(path: Path, values: dict[str, Any]) -> tuple[float, RopeScaling]:
    """rope_theta and scaling, from rope_parameters (newer files) or rope_theta and rope_scaling (older ones)."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = _number(path, {**values, **rope}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", _number(path, rope, "factor"))
    if kind == "llama3":
        numbers = (_number(path, rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return theta, RopeScaling("llama3", *numbers, _integer(path, rope, "original_max_position_embeddings"))
    raise LoadError(f"{path}: field rope_type is {kind!r}; known are default, linear and llama3")


def _eos_token_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json's end tokens where it names any, else config.json's."""
    found = values.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        found = _read_json(generation).get("eos_token_id", found)
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise LoadError(f"{folder}: field eos_token_id must be a token id or a list of them, got {found!r}")
    return tuple(sorted(set(ids)))
