"""The forward pass of a step with one token, in five launches a layer instead of nine or more.

A product of one row goes over its whole input in every program, so norms, the residual sum and SiLU·mul are done there in passing
(pagecast_kernels.gemv), as are the rotation of heads and the write of K and V (pagecast_kernels.rotated): a sixth launch where heads
are normed, where the cache is of e4m3, or before Hopper. Alone, a request's time between tokens is little more than reading the weights
and launching kernels.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.layers.experts import Experts
from pagecast_worker.layers.quantized import Packed, suits_heads, suits_one_row
from pagecast_worker.layers.step_inputs import StepInputs

if TYPE_CHECKING:
    from pagecast_worker.models.decoder import Decoder


def suits(model: "Decoder") -> bool:
    """Whether these kernels can take a model: weights of kinds that they know; no mixture over several ranks, nor a quantized one."""
    config = model.config
    if config.latent is not None:
        return False
    if model.ranks.size > 1 and any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        return False
    if config.post_norms or config.activation != "silu" or config.embedding_scale != 1.0:
        return False
    products = [p for layer in model.layers for p in (layer.attention.qkv, layer.attention.output)]
    for layer in model.layers:
        dense = layer.feed_forward.shared if isinstance(layer.feed_forward, Experts) else layer.feed_forward
        products += [] if dense is None else [dense.gate_up, dense.down]
        if dense is not None and isinstance(dense.gate_up.weight, Packed) and not dense.gate_up.weight.weight.paired:
            return False
    if any(isinstance(layer.feed_forward, Experts) for layer in model.layers) and not all(isinstance(p.weight, Tensor) for p in products):
        return False
    return all(layer.attention.output.bias is None for layer in model.layers) and all(suits_one_row(p.weight) for p in products)


def _experts(ops: Any, block: Experts, x: Tensor, residual: Tensor) -> None:
    """What a mixture gives for x [1, H] is added to the residual."""
    if block.shared is not None:
        ops.linear_add(ops.linear_silu_mul(x, block.shared.gate_up.weight), block.shared.down.weight, residual)
    block.add(ops, x, residual)


def _add(model: "Decoder", ops: Any, x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual[1, N] += x[1, K] · weight[N, K]ᵀ, the sum over ranks where there are several."""
    if model.ranks.size == 1:
        ops.linear_add(x, weight, residual)
    else:
        model.ranks.add(ops, ops.linear(x, weight), residual)


def _rotates(attention: Attention, x: Tensor, k_cache: Tensor) -> bool:
    """Whether the product of q, k and v rotates heads and writes to the cache itself."""
    from pagecast_kernels import configs

    plain = attention.q_norm is None and attention.k_norm is None and k_cache.dtype == x.dtype
    return plain and suits_heads(attention.qkv.weight, attention.head_dim) and configs.rotates_in_product(x.device)


def forward(model: "Decoder", ops: Any, step: StepInputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Hidden state [1, H] after the last norm; see Decoder.forward."""
    from pagecast_kernels.rotated import Heads

    eps = model.config.rms_norm_eps
    residual = model.embedding.forward(ops, step.token_ids)
    for layer, (k_cache, v_cache) in zip(model.layers, caches, strict=True):
        attention, feed_forward = layer.attention, layer.feed_forward
        product = (residual, layer.attention_norm, eps, attention.qkv.weight)
        if _rotates(attention, residual, k_cache):
            heads = Heads(attention.cos_sin, step.positions, step.slot_mapping, k_cache, v_cache, attention.num_heads)
            q = ops.norm_linear_heads(*product, heads, attention.qkv.bias)
            attended = attention.attend_rotated(ops, q, step, k_cache, v_cache)
        else:
            attended = attention.attend(ops, ops.norm_linear(*product, attention.qkv.bias), step, k_cache, v_cache)
        _add(model, ops, attended, attention.output.weight, residual)
        if isinstance(feed_forward, Experts):
            _experts(ops, feed_forward, ops.rms_norm(residual, layer.feed_forward_norm, eps), residual)
            continue
        inner = ops.norm_linear_silu_mul(residual, layer.feed_forward_norm, eps, feed_forward.gate_up.weight)
        _add(model, ops, inner, feed_forward.down.weight, residual)
    return ops.rms_norm(residual, model.norm, eps)  # type: ignore[no-any-return]
