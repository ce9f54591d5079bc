"""The Llama family (Touvron et al. 2023): pre-norm decoder, grouped-query attention, rotary positions, SwiGLU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.layers.embedding import Embedding, Head
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.rotary import cos_sin_table
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.models import one_row
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.parallel import Part, Ranks


@dataclass(slots=True)
class Layer:
    """One decoder layer: norm weights [H] and the two blocks."""

    attention_norm: Tensor
    attention: Attention
    feed_forward_norm: Tensor
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Source:
    """Where a piece of a parameter comes from: the rows from `row` on of `parameter` are this rank's part of a checkpoint tensor.

    shape: of the whole checkpoint tensor. part: what this rank holds of it; None: all.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    row: int = 0
    part: Part | None = None


class Llama:
    """Weights of one rank and the forward pass over them. Parameters are allocated empty; `sources` says how to fill them."""

    def __init__(self, config: ModelConfig, ranks: Ranks, device: torch.device, dtype: torch.dtype, max_positions: int) -> None:
        self.config = config
        self.ranks = ranks
        self.kv_copies = ranks.copies(config.num_kv_heads, "num_key_value_heads")
        """Ranks that hold the same KV head, where there are more ranks than heads."""
        self.num_kv_heads = config.num_kv_heads * self.kv_copies // ranks.size
        self._make = lambda *shape: torch.empty(shape, device=device, dtype=dtype)
        self.vocabulary = ranks.vocabulary(config.vocab_size)
        self.embedding = Embedding(self._make(self.vocabulary.size, config.hidden_size), self.vocabulary.start, ranks)
        head = self.embedding.weight if config.tie_word_embeddings else self._make(self.vocabulary.size, config.hidden_size)
        self.head = Head(head, config.vocab_size, ranks)
        self.norm = self._make(config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.cos_sin = cos_sin_table(config, max_positions, device)

    def _layer(self) -> Layer:
        config, make = self.config, self._make
        heads, hidden, dim = self.ranks.share(config.num_heads, "num_attention_heads"), config.hidden_size, config.head_dim
        inner = self.ranks.share(config.intermediate_size, "intermediate_size")
        attention = Attention(
            ColumnParallel(make((heads + 2 * self.num_kv_heads) * dim, hidden)), RowParallel(make(hidden, heads * dim), self.ranks),
            num_heads=heads, num_kv_heads=self.num_kv_heads, head_dim=dim, scale=config.softmax_scale,
        )
        feed_forward = FeedForward(ColumnParallel(make(2 * inner, hidden)), RowParallel(make(hidden, inner), self.ranks))
        return Layer(make(hidden), attention, make(hidden), feed_forward)

    def sources(self) -> Iterator[Source]:
        """Every checkpoint tensor that the model needs, and its place."""
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        yield Source("model.embed_tokens.weight", vocabulary, self.embedding.weight, part=self.vocabulary)
        if not config.tie_word_embeddings:
            yield Source("lm_head.weight", vocabulary, self.head.weight, part=self.vocabulary)
        yield Source("model.norm.weight", (config.hidden_size,), self.norm)
        for index, layer in enumerate(self.layers):
            yield from self._layer_sources(f"model.layers.{index}.", layer)

    def _layer_sources(self, prefix: str, layer: Layer) -> Iterator[Source]:
        config, hidden, dim = self.config, self.config.hidden_size, self.config.head_dim
        attention, feed_forward, part = layer.attention, layer.feed_forward, self.ranks.part
        query, key, inner = config.num_heads * dim, config.num_kv_heads * dim, config.intermediate_size
        yield Source(prefix + "input_layernorm.weight", (hidden,), layer.attention_norm)
        yield Source(prefix + "post_attention_layernorm.weight", (hidden,), layer.feed_forward_norm)
        row = 0
        for name, rows, copies in (("q", query, 1), ("k", key, self.kv_copies), ("v", key, self.kv_copies)):
            held = part(0, rows, "the rows of heads", copies)
            yield Source(f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), attention.qkv.weight, row, held)
            row += held.size
        held = part(1, query, "num_attention_heads")
        yield Source(prefix + "self_attn.o_proj.weight", (hidden, query), attention.output.weight, part=held)
        held = part(0, inner, "intermediate_size")
        for place, name in enumerate(("gate", "up")):
            yield Source(f"{prefix}mlp.{name}_proj.weight", (inner, hidden), feed_forward.gate_up.weight, place * held.size, held)
        held = part(1, inner, "intermediate_size")
        yield Source(prefix + "mlp.down_proj.weight", (hidden, inner), feed_forward.down.weight, part=held)

    def forward(self, ops: Any, step: StepInputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [T, H] after the last norm. caches: K and V of every layer, written and read in place."""
        if ops.one_row and step.token_ids.shape[0] == 1:
            return one_row.forward(self, ops, step, caches)
        eps = self.config.rms_norm_eps
        residual = self.embedding.forward(ops, step.token_ids)
        x = ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        for index, layer in enumerate(self.layers):
            k_cache, v_cache = caches[index]
            x = layer.attention.forward(ops, x, step, self.cos_sin, k_cache, v_cache)
            x = self.ranks.add_rms_norm(ops, x, residual, layer.feed_forward_norm, eps)
            x = layer.feed_forward.forward(ops, x)
            following = self.layers[index + 1].attention_norm if index + 1 < len(self.layers) else self.norm
            x = self.ranks.add_rms_norm(ops, x, residual, following, eps)
        return x

    def logits(self, ops: Any, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V] in the model's dtype."""
        return self.head.forward(ops, hidden)

    def num_parameters(self) -> int:
        """Of the whole model, over all ranks."""
        total = 0
        for source in self.sources():
            count = 1
            for size in source.shape:
                count *= size
            total += count
        return total
