"""Quantized weights as other engines read them: tensors of a layer, and what config.json says about them.

compressed-tensors for int4 and fp8; AWQ's GEMM layout for AWQ.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagecast_worker.executor import LoadError
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.loading.stored import AWQ_COLUMNS, Stored

METHODS = ("awq", "gptq", "rtn-int4", "fp8")


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """uint8[R, C] of 4 bits -> int32[R, C / 8], the lowest bits first; C is filled up with zeros."""
    lanes = F.pad(values, (0, -values.shape[1] % 8)).view(values.shape[0], -1, 8).to(torch.int32)
    words = torch.zeros(lanes.shape[:2], dtype=torch.int32, device=values.device)
    for place, column in enumerate(order):
        words |= lanes[..., column] << (4 * place)
    return words


def tensors_of(stored: Stored, method: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer by their endings, on the CPU. dtype: of scales, where the format leaves it open."""
    if method == "awq":
        assert stored.zeros is not None
        found = {
            "qweight": _words(stored.values.t(), AWQ_COLUMNS), "qzeros": _words(stored.zeros.t().to(torch.uint8), AWQ_COLUMNS),
            "scales": stored.scales.t().half(),
        }  # fmt: skip
    elif method == "fp8":
        found = {"weight": stored.values.view(torch.float8_e4m3fn), "weight_scale": stored.scales.float()}
    else:
        found = {
            "weight_packed": _words(stored.values), "weight_scale": stored.scales.to(dtype),
            "weight_shape": torch.tensor(stored.values.shape, dtype=torch.int64),
        }  # fmt: skip
    return {ending: value.cpu().contiguous() for ending, value in found.items()}


def check_shape(method: str, group: int, name: str, rows: int, columns: int) -> None:
    """Raises LoadError for a weight that the format cannot hold."""
    if method == "awq" and (rows % 8 or columns % group):
        raise LoadError(f"group_size must divide the {columns} columns of {name} for awq, and 8 its {rows} rows, got {group}")


def scheme_of(method: str, group: int) -> Scheme:
    """What a reader makes of it."""
    if method == "awq":
        return Scheme("awq", 4, group, "AWQ-int4")
    if method == "fp8":
        return Scheme("fp8", 8, 0, "W8A8-FP8", activations="fp8")
    return Scheme("packed", 4, group, "W4A16")


def quantization_config(method: str, group: int, plain: list[str]) -> dict[str, Any]:
    """For config.json. plain: layers that were left as they are."""
    if method == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": plain,
        }  # fmt: skip
    weights: dict[str, Any] = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False, "actorder": None,
        "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    activations = None
    if method == "fp8":
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
        activations = weights | {"strategy": "token", "dynamic": True, "observer": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized" if method == "fp8" else "pack-quantized",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None, "ignore": plain,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
        },
    }  # fmt: skip
