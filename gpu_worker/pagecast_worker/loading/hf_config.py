"""config.json and generation_config.json of a Hugging Face folder. The family that config.json names reads it, field by field."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.schemes import Scheme, read_scheme
from pagecast_worker.models.architecture import Architecture
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.fields import Fields
from pagecast_worker.models.registry import architectures


def read_config(folder: Path) -> tuple[ModelConfig, Scheme | None]:
    """The configuration of a model folder, and how its weights are quantized. Raises LoadError naming file and field."""
    path = folder / "config.json"
    values = _read_json(path)
    family = _family(path, values)
    fields = Fields(path, values | {"architectures": [family.name]})
    scheme = read_scheme(path, fields.get("quantization_config"))
    config = family.read(fields)
    fields.finish()
    quantization = "" if scheme is None else scheme.name
    return dataclasses.replace(config, eos_token_ids=_eos_token_ids(folder, values), quantization=quantization), scheme


def _family(path: Path, values: dict[str, Any]) -> Architecture:
    """By the architecture's name; a folder with code of its own (auto_map) by its model_type, and its code is never run."""
    known, named = architectures(), values.get("architectures")
    if "auto_map" in values:
        kind = values.get("model_type")
        found = [one for one in known.values() if one.model_type == kind]
        if not found:
            raise LoadError(f"{path}: field auto_map names code, which is never run, and model_type {kind!r} is not known")
        return found[0]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise LoadError(f"{path}: field architectures is {named!r}; known are {', '.join(known)}")
    return known[named[0]]


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
