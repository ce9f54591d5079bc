"""How a checkpoint is quantized, from the quantization_config of its config.json. What is not understood is refused by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagecast_worker.executor import LoadError

Form = Literal["awq", "gptq", "packed", "int8", "fp8"]
"""packed: compressed-tensors' integers of 4 or 8 bits in words; int8 and fp8: values of that type beside their scales."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """form: how tensors are laid out. bits: of a value. group: columns that share a scale, 0: whole rows. activations: the 8-bit type
    that x is rounded to ("" for none); block: rows and columns that share a scale of fp8, or (0, 0). plus_one: gptq zeros are stored
    one too small. name: what people call it.
    """

    form: Form
    bits: int
    group: int
    name: str
    activations: Literal["", "int8", "fp8"] = ""
    block: tuple[int, int] = (0, 0)
    plus_one: bool = False


class _Values:
    """quantization_config, or a part of it, with a name for messages."""

    def __init__(self, path: Path, name: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise LoadError(f"{path}: field {name} must be an object, got {values!r}")
        self.path, self.name, self.values = path, name, values

    def one_of(self, field: str, *allowed: Any) -> Any:
        """A value that may be only one of these; the first where it is missing."""
        value = self.values.get(field)
        value = allowed[0] if value is None else value
        if value not in allowed:
            known = ", ".join(repr(one) for one in allowed)
            raise LoadError(f"{self.path}: field {self.name}.{field} must be one of {known}, got {value!r}")
        return value

    def group(self, field: str) -> int:
        """A group size; 0 for -1 and null."""
        value = self.values.get(field)
        if value in (None, -1):
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LoadError(f"{self.path}: field {self.name}.{field} must be a positive integer or -1, got {value!r}")
        return value

    def part(self, field: str) -> "_Values":
        return _Values(self.path, f"{self.name}.{field}", self.values.get(field) or {})


def read_scheme(path: Path, values: Any) -> Scheme | None:
    """The scheme that quantization_config names; None where there is none. Raises LoadError."""
    if values is None:
        return None
    config = _Values(path, "quantization_config", values)
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8, "fbgemm_fp8": _fp8}
    return readers[config.one_of("quant_method", *sorted(readers))](config)


def _awq(config: _Values) -> Scheme:
    config.one_of("version", "gemm", "GEMM")
    config.one_of("bits", 4)
    config.one_of("zero_point", True)
    return Scheme("awq", 4, config.group("group_size"), "AWQ-int4")


def _gptq(config: _Values) -> Scheme:
    bits = config.one_of("bits", 4, 8)
    plus_one = config.one_of("checkpoint_format", "gptq", "gptq_v2") == "gptq"
    return Scheme("gptq", bits, config.group("group_size"), f"GPTQ-int{bits}", plus_one=plus_one)


def _fp8(config: _Values) -> Scheme:
    config.one_of("activation_scheme", "dynamic", "static")
    block = config.values.get("weight_block_size")
    if block is None:
        return Scheme("fp8", 8, 0, "FP8", activations="fp8")
    if block != [128, 128]:
        raise LoadError(f"{config.path}: field quantization_config.weight_block_size must be [128, 128], got {block!r}")
    return Scheme("fp8", 8, 128, "FP8-block", block=(128, 128))


def _compressed(config: _Values) -> Scheme:
    groups = config.part("config_groups").values
    if not groups:
        raise LoadError(f"{config.path}: field quantization_config.config_groups must name a scheme, got none")
    found = {_compressed_group(config, name) for name in groups}
    if len(found) != 1:
        raise LoadError(f"{config.path}: field quantization_config.config_groups must give all layers one scheme, got {len(found)}")
    return found.pop()


def _compressed_group(config: _Values, name: str) -> Scheme:
    group = config.part("config_groups").part(name)
    weights = group.part("weights")
    kind, bits = weights.one_of("type", "int", "float"), weights.one_of("num_bits", 8, 4)
    weights.one_of("dynamic", False)
    strategy = weights.one_of("strategy", "channel", "tensor", "group", "block")
    activations = None if group.values.get("input_activations") is None else group.part("input_activations")
    if activations is not None:
        activations.one_of("type", kind)
        activations.one_of("num_bits", 8)
        activations.one_of("symmetric", True)
        activations.one_of("strategy", "token", "tensor", "group")
    if kind == "float":
        if bits != 8:
            raise LoadError(f"{config.path}: field {weights.name}.num_bits must be 8 for type 'float', got {bits}")
        if strategy == "block":
            if weights.values.get("block_structure") not in ([128, 128], "128x128"):
                raise LoadError(f"{weights.path}: field {weights.name}.block_structure must be [128, 128]")
            return Scheme("fp8", 8, 128, "FP8-block", block=(128, 128))
        if strategy == "group":
            raise LoadError(f"{config.path}: field {weights.name}.strategy must be channel, tensor or block for type 'float', got 'group'")
        return Scheme("fp8", 8, 0, "W8A8-FP8" if activations else "W8A16-FP8", activations="fp8" if activations else "")
    size = weights.group("group_size") if strategy == "group" else 0
    if activations is None:
        return Scheme("packed", bits, size, f"W{bits}A16")
    if bits != 8 or size:
        got = f"{bits} bits by {strategy}"
        raise LoadError(f"{config.path}: field {weights.name} must be 8 bits by channel beside 8-bit activations, got {got}")
    return Scheme("int8", 8, 0, "W8A8-int8", activations="int8")
