"""AWQ, GPTQ and FP8 files, packed here value by value as their formats say."""

import json
import re

import torch
from safetensors.torch import load_file, save_file
from worker.family_model import write_family

from pagecast_kernels.quantized_weights import round_to_nearest

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def words(table: list[list[int]], bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Rows of small integers as rows of int32 words, the lowest bits first; order: which value of a word's comes at each place."""
    per = 32 // bits
    order = order or list(range(per))
    return torch.tensor(
        [[signed(sum(row[at + order[i]] << bits * i for i in range(per))) for at in range(0, len(row), per)] for row in table],
        dtype=torch.int32,
    )


def awq(weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """AWQ tensors of a weight [N, K], and the weight that they mean."""
    values, scales, zeros = round_to_nearest(weight, group, False, 4)
    scales = scales.half()
    spread = lambda x: x.repeat_interleave(group, 1)
    tensors = {
        "qweight": words(values.t().tolist(), 4, AWQ_ORDER), "qzeros": words(zeros.int().t().tolist(), 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }  # fmt: skip
    return tensors, (values.float() - spread(zeros)) * spread(scales.float())


def gptq(weight: torch.Tensor, group: int, bits: int, order: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """GPTQ tensors. order: columns by importance, the first `group` of which share the first scale."""
    columns = weight.shape[1]
    order = torch.arange(columns) if order is None else order
    index = torch.empty(columns, dtype=torch.int64)
    index[order] = torch.arange(columns) // group
    values, scales, zeros = round_to_nearest(weight[:, order], group, False, bits)
    zeros = zeros.clamp(min=1)
    values, scales = values[:, order.argsort()], scales.half()
    tensors = {
        "qweight": words(values.tolist(), bits).t().contiguous(), "qzeros": words((zeros.int() - 1).t().tolist(), bits),
        "scales": scales.t().contiguous(), "g_idx": index.int(),
    }  # fmt: skip
    return tensors, (values.float() - zeros[:, index]) * scales.float()[:, index]


def fp8_block(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks of 128 x 128 that share a scale, the last ones smaller."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    values, meant = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            values.view(torch.uint8)[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn).view(torch.uint8)
            meant[block] = values[block].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, meant


def fp8_rows(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A scale for each row, as FBGEMM writes them."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scales, "input_scale_ub": torch.tensor(1200.0)}, values.float() * scales


def fp8_tensor(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One scale, beside one that was fixed for activations beforehand and is not used."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, values.float() * scale


FORMATS = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, lambda w: awq(w, 32)),
    "gptq int4": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, lambda w: gptq(w, 64, 4, None)),
    "gptq int8": ({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True}, lambda w: gptq(w, 128, 8, None)),
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w: gptq(w, 32, 4, torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(w.shape[1]))),
    ),
    "gptq orders that differ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w: gptq(w, 32, 4, torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(int(w.abs().sum())))),
    ),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, fp8_block),
}  # fmt: skip
EIGHT_BITS = {
    "fp8 rows": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
}
PRODUCT = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


def write_quantized(folder, config, make, name="LlamaForCausalLM", **changes):
    """A checkpoint with every projection made by `make`, and one with the weights that it means, as transformers would load it."""
    source, _ = write_family(name, folder / "plain", **(SIZES | changes))
    values = json.loads((source / "config.json").read_text())
    tensors, quantized = load_file(source / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if not PRODUCT.search(name):
            quantized[name] = weight
            continue
        parts, tensors[name] = make(weight)
        quantized |= {name.removesuffix("weight") + ending: value.contiguous() for ending, value in parts.items()}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    save_file(quantized, folder / "model.safetensors")
    save_file(tensors, source / "model.safetensors")
    return folder, source
