"""Runs a model layer by layer over calibration tokens and gathers what its products are given."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels.reference_experts import expert_product
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.models.decoder import Decoder, Layer

Weight = tuple[Tensor, int | None]
"""A parameter, and the expert of it that is meant."""
_BLOCK_SIZE = 16
_TOKENS_AT_ONCE = 4096


@dataclass(slots=True)
class Inputs:
    """What one product was given: hessian float32[K, K] = sum of x xᵀ, magnitude float32[K] = sum of |x|, over `tokens` tokens."""

    hessian: Tensor
    magnitude: Tensor
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """x[tokens, K]."""
        wide = x.float()
        self.hessian.addmm_(wide.t(), wide)
        self.magnitude += wide.abs().sum(0)
        self.tokens += len(wide)


class _Batch:
    """Some of the sequences: their residual stream, and the step that they make up."""

    def __init__(self, model: Decoder, ops: Any, sequences: list[list[int]]) -> None:
        count, length, device = len(sequences), len(sequences[0]), model.device
        blocks = -(-length // _BLOCK_SIZE)
        position = torch.arange(length, device=device, dtype=torch.int32)
        table = torch.arange(1, count * blocks + 1, device=device, dtype=torch.int32).view(count, blocks)
        slots = table.long().repeat_interleave(_BLOCK_SIZE, 1)[:, :length] * _BLOCK_SIZE + position % _BLOCK_SIZE
        none = position[:0]
        self.step = StepInputs(
            token_ids=torch.tensor(sequences, device=device, dtype=torch.int32).flatten(), positions=position.repeat(count),
            slot_mapping=slots.flatten(), block_table=table, num_decodes=0, decode_rows=none, decode_seq_lens=none, num_prefills=count,
            prefill_rows=torch.arange(count, device=device, dtype=torch.int32),
            prefill_seq_lens=torch.full((count,), length, device=device, dtype=torch.int32),
            query_start_loc=torch.arange(count + 1, device=device, dtype=torch.int32) * length, max_query_len=length,
        )
        heads, key, value = model.kv_shape
        self.cache = tuple(torch.zeros((count * blocks + 1, heads, _BLOCK_SIZE, d), device=device, dtype=model.dtype) for d in (key, value))
        self.residual = model.embed(ops, self.step.token_ids)


class Calibration:
    """Sequences of equal length on their way through a model. Layers are passed in order, each first with `inputs`, then by `advance`."""

    def __init__(self, model: Decoder, ops: Any, sequences: list[list[int]]) -> None:
        self._model, self._ops = model, ops
        share = max(_TOKENS_AT_ONCE // len(sequences[0]), 1)
        self._batches = [_Batch(model, ops, sequences[start : start + share]) for start in range(0, len(sequences), share)]

    @torch.inference_mode()
    def inputs(self, layer: Layer, weights: list[Weight]) -> list[Inputs]:
        """What the layer's products with these weights are given, with the layer as it is. Experts are given their own tokens only."""
        found: dict[tuple[int, int | None], Inputs] = {}
        for weight, expert in weights:
            size, device = weight.shape[-1], weight.device
            found[id(weight), expert] = Inputs(torch.zeros((size, size), device=device), torch.zeros(size, device=device))

        def watched(name: str) -> Any:
            plain = getattr(self._ops, name)

            def operator(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
                if (id(weight), None) in found:
                    found[id(weight), None].add(x)
                return plain(x, weight, *rest, **named)  # type: ignore[no-any-return]

            return operator

        def product(x: Tensor, weight: Tensor, expert: int) -> Tensor:
            if (id(weight), expert) in found:
                found[id(weight), expert].add(x)
            return expert_product(x, weight, expert)

        watch = SimpleNamespace(**vars(self._ops) | {name: watched(name) for name in ("linear", "linear_silu_mul", "linear_gelu_mul")})
        watch.mixture = partial(self._ops.mixture, product=product)
        for batch in self._batches:
            self._pass(watch, layer, batch)
        return [found[id(weight), expert] for weight, expert in weights]

    @torch.inference_mode()
    def advance(self, layer: Layer) -> None:
        """On to the next layer's inputs, through this one as it is now."""
        for batch in self._batches:
            batch.residual = self._pass(self._ops, layer, batch)

    def _pass(self, ops: Any, layer: Layer, batch: _Batch) -> Tensor:
        """The residual stream after the layer."""
        eps, residual = self._model.config.rms_norm_eps, batch.residual.clone()
        x = ops.rms_norm(residual, layer.attention_norm, eps)
        x = layer.attention.forward(ops, x, batch.step, *batch.cache)
        x = self._model.add(ops, x, layer.post_attention_norm, residual, layer.feed_forward_norm)
        x = layer.feed_forward.forward(ops, x)
        residual += x if layer.post_feed_forward_norm is None else ops.rms_norm(x, layer.post_feed_forward_norm, eps)
        return residual


def sequences_of(tokens: list[int], length: int, count: int) -> Iterator[list[int]]:
    """Up to `count` runs of `length` tokens, spread evenly over the text."""
    whole = len(tokens) // length
    for index in range(min(count, whole)):
        start = (index * whole // min(count, whole)) * length
        yield tokens[start : start + length]
