"""The forward pass of a step with several tokens where norms take no launch of their own.

RMSNorm multiplies a row by its weight and by one factor, 1 / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019). A product is linear: the
weight may be multiplied into the product's columns once, and the factor be applied to what the product gives, by the kernel that comes
next anyway. The product before it adds its result to the residual stream in place. What remains of a layer's two launches of a residual
sum and a norm is that two kernels look at the row once more.

The product's weight is then rounded once more, and its input once less: errors are alike. Sums grow with the residual stream, whose
values may be some thousands: too much for float16.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.step_inputs import StepInputs

if TYPE_CHECKING:
    from pagecast_worker.models.decoder import Decoder, Layer


def suits(model: "Decoder") -> bool:
    """Whether norms can be folded: plain weights of bfloat16 on one rank, in layers of which nothing else reads what is normed."""
    config = model.config
    if model.dtype != torch.bfloat16 or model.ranks.size > 1 or config.post_norms or config.norm_offset or config.activation != "silu":
        return False
    for layer in model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        if not isinstance(attention, Attention) or not isinstance(feed_forward, FeedForward) or attention.output.bias is not None:
            return False
        products = (attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down)
        if not all(isinstance(product.weight, Tensor) for product in products):
            return False
    return True


def fold(model: "Decoder") -> None:
    """Multiplies the weights of norms into those of the products that follow them, in place and rounded once, and leaves ones."""
    for layer in model.layers:
        attention, feed_forward = _blocks(layer)
        for norm, product in ((layer.attention_norm, attention.qkv), (layer.feed_forward_norm, feed_forward.gate_up)):
            assert isinstance(product.weight, Tensor)
            product.weight.mul_(norm)
            norm.fill_(1.0)
    model.folded = True


def _blocks(layer: "Layer") -> tuple[Attention, FeedForward]:
    """A layer's two blocks, where `suits` said so."""
    assert isinstance(layer.attention, Attention) and isinstance(layer.feed_forward, FeedForward)
    return layer.attention, layer.feed_forward


def forward(model: "Decoder", ops: Any, step: StepInputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Hidden states after the last norm; see Decoder.forward."""
    eps, residual = model.config.rms_norm_eps, model.embed(ops, step.token_ids)
    for layer, cache in zip(model.layers, caches, strict=True):
        attention, feed_forward = _blocks(layer)
        attended = attention.attend(ops, ops.linear(residual, attention.qkv.weight), step, *cache, residual)
        if step.wanted is not None and layer is model.layers[-1]:
            attended, residual = attended.index_select(0, step.wanted), residual.index_select(0, step.wanted)
        ops.linear_add(attended, attention.output.weight, residual)
        activated = ops.linear_silu_mul(residual, feed_forward.gate_up.weight, eps)
        ops.linear_add(activated, feed_forward.down.weight, residual)
    return ops.rms_norm(residual, model.norm, eps)  # type: ignore[no-any-return]
