"""Checkpoints quantized and written by compressed-tensors, and that library's own forward pass over them."""

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from worker.family_model import PROMPT, write_family

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
TOKEN_INT8 = TOKEN_FP8 | {"type": "int"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
SCHEMES = {
    "w4a16 symmetric": (INT4 | {"symmetric": True}, None),
    "w4a16 asymmetric": (INT4 | {"symmetric": False, "group_size": 64}, None),
    "w4a16 whole rows": ({"num_bits": 4, "type": "int", "strategy": "channel"}, None),
    "w8a16": ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128}, None),
    "w8a8 int8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, TOKEN_INT8),
    "w8a8 fp8": (FP8, TOKEN_FP8),
    "w8a8 fp8 per tensor": (FP8 | {"strategy": "tensor"}, TOKEN_FP8),
    "w8a16 fp8": (FP8, None),
}


def _scales(module: torch.nn.Module) -> None:
    """Scales and zero points from each group's range."""
    args, weight = module.quantization_scheme.weights, module.weight.data
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    parts = weight.view(weight.shape[0], -1, size)
    low, high = parts.amin(-1), parts.amax(-1)
    if args.strategy == "tensor":
        low, high = low.amin().view(1), high.amax().view(1)
    scale, zero = calculate_qparams(low, high, args)
    module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
    module.quantization_status = QuantizationStatus.FROZEN


def write_compressed(folder, scheme: str, ignore: tuple[str, ...] = ("lm_head",), name: str = "LlamaForCausalLM", **changes):
    """The folder, and logits [T, V] of PROMPT by the library's quantized modules."""
    weights, activations = SCHEMES[scheme]
    _, model = write_family(name, folder / "plain", hidden_size=128, intermediate_size=256, head_dim=32, **changes)
    own = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=activations and QuantizationArgs(**activations)
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": own}, ignore=list(ignore)))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _scales(module)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder, logits


def write_compressed_mixture(folder, scheme: str, name: str, **changes):
    """A checkpoint of a mixture of experts, and one with the weights that the library makes of it.

    transformers keeps experts in one tensor and files name them one by one, so the library is given modules of the files' names.
    """
    weights, activations = SCHEMES[scheme]
    source, _ = write_family(name, folder / "plain", hidden_size=128, head_dim=32, **changes)
    tensors, tree = load_file(source / "model.safetensors"), torch.nn.Module()
    products = {key.removesuffix(".weight"): value for key, value in tensors.items() if "_proj.weight" in key}
    for path, weight in products.items():
        *parents, last = path.split(".")
        module = tree
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data.copy_(weight)
        module.add_module(last, linear)
    own = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=activations and QuantizationArgs(**activations)
    )
    apply_quantization_config(tree, QuantizationConfig(config_groups={"group_0": own}, ignore=["lm_head"]))
    for path in products:
        module = tree.get_submodule(path)
        _scales(module)
        zero = getattr(module, "weight_zero_point", None)
        tensors[f"{path}.weight"] = fake_quantize(module.weight.data, module.weight_scale.data, zero, own.weights)
    compressor = ModelCompressor.from_pretrained_model(tree)
    compressor.compress_model(tree)
    plain = {key: value for key, value in tensors.items() if key.removesuffix(".weight") not in products}
    save_file(tensors, source / "model.safetensors")
    save_file(plain | {key: value.contiguous() for key, value in tree.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    compressor.update_config(folder)
    return folder, source
