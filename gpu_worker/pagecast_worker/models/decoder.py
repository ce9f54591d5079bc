"""A decoder of any family: its parameters on one rank, where they come from, and the forward pass over them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.layers.embedding import Embedding, Head
from pagecast_worker.layers.experts import Experts, Grouped
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.latent_attention import LatentAttention
from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.quantized import Rows, takes
from pagecast_worker.layers.rotary import cos_sin_table
from pagecast_worker.layers.step_inputs import StepInputs
from pagecast_worker.models import folded, one_row, sources
from pagecast_worker.models.config import LatentConfig, ModelConfig
from pagecast_worker.models.names import Names
from pagecast_worker.models.weights import Source
from pagecast_worker.parallel import Ranks


@dataclass(slots=True)
class Layer:
    """One decoder layer: norm weights [H] and the two blocks."""

    attention_norm: Tensor
    attention: Attention | LatentAttention
    feed_forward_norm: Tensor
    feed_forward: FeedForward | Experts
    post_attention_norm: Tensor | None = None
    post_feed_forward_norm: Tensor | None = None


def activations(block: Attention | LatentAttention | FeedForward | Experts) -> torch.dtype | None:
    """The 8-bit type in which a block takes its input, if it does."""
    if isinstance(block, Attention):
        return takes(block.qkv.weight)
    if isinstance(block, LatentAttention):
        return takes(block.down.weight)
    return takes(block.gate_up.weight) if isinstance(block, FeedForward) else None


class Decoder:
    """Weights of one rank and the forward pass. Parameters are allocated empty; `sources` says how to fill them."""

    def __init__(
        self, config: ModelConfig, names: Names, ranks: Ranks, device: torch.device, dtype: torch.dtype, max_positions: int,
        *, quantized: bool = False, quantized_head: bool = False,
    ) -> None:  # fmt: skip
        """quantized: weights of layers' products get no memory here; whoever fills the model puts others in their place. quantized_head:
        nor does that of an output head that is not tied."""
        self.config, self.names, self.ranks, self.dtype, self.device = config, names, ranks, dtype, device
        self._product_device = torch.device("meta") if quantized else device
        heads, key, value = config.kv_shape()
        self.kv_copies = ranks.copies(heads, "num_key_value_heads")
        """Ranks that hold the same KV head, where there are more ranks than heads."""
        self.num_kv_heads = heads * self.kv_copies // ranks.size
        self.kv_shape = (self.num_kv_heads, key, value)
        self.vocabulary = ranks.vocabulary(config.vocab_size)
        self.embedding = Embedding(self._make(self.vocabulary.size, config.hidden_size), self.vocabulary.start, ranks)
        shape, place = (self.vocabulary.size, config.hidden_size), torch.device("meta") if quantized_head else device
        head = self.embedding.weight if config.tie_word_embeddings else torch.empty(shape, device=place, dtype=dtype)
        self.head = Head(head, config.vocab_size, ranks)
        self.norm = self._norm(config.hidden_size)
        self.cos_sin = cos_sin_table(config, max_positions, device)
        self._local_cos_sin = cos_sin_table(config, max_positions, device, local=True) if config.local_rope_theta else self.cos_sin
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self.folded = False
        """Whether norms of layers are folded into the products that follow them, and their weights ones."""

    def _make(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _product(self, *shape: int) -> Tensor:
        """The weight of a product."""
        return torch.empty(shape, device=self._product_device, dtype=self.dtype)

    def _norm(self, size: int) -> Tensor:
        """Weights near 0 that get 1 added lose most of their digits in 16 bits, so those are kept in 32."""
        return torch.empty(size, device=self.device, dtype=torch.float32 if self.config.norm_offset else self.dtype)

    def _layer(self, index: int) -> Layer:
        hidden = self.config.hidden_size
        layer = Layer(self._norm(hidden), self._attention(index), self._norm(hidden), self._feed_forward(index))
        if self.config.post_norms:
            layer.post_attention_norm, layer.post_feed_forward_norm = self._norm(hidden), self._norm(hidden)
        return layer

    def _attention(self, index: int) -> Attention | LatentAttention:
        config, make = self.config, self._make
        if config.latent is not None:
            return self._latent_attention(config.latent)
        heads, hidden, dim = self.ranks.share(config.num_heads, "num_attention_heads"), config.hidden_size, config.head_dim
        rows, window = (heads + 2 * self.num_kv_heads) * dim, config.window(index)
        attention = Attention(
            ColumnParallel(self._product(rows, hidden), make(rows) if config.attention_bias else None),
            RowParallel(self._product(hidden, heads * dim), self.ranks, make(hidden) if config.output_bias else None),
            num_heads=heads, num_kv_heads=self.num_kv_heads, head_dim=dim, scale=config.softmax_scale,
            cos_sin=self._local_cos_sin if window else self.cos_sin, window=window, softcap=config.attention_softcap,
            eps=config.rms_norm_eps,
        )
        if config.qk_norm:
            attention.q_norm, attention.k_norm = self._norm(dim), self._norm(dim)
        return attention

    def _latent_attention(self, shape: LatentConfig) -> LatentAttention:
        config, make, hidden = self.config, self._make, self.config.hidden_size
        heads = self.ranks.share(config.num_heads, "num_attention_heads")
        query = heads * (shape.nope_dim + shape.rope_dim)
        rows = (shape.query_rank or query) + shape.rank + shape.rope_dim
        return LatentAttention(
            ColumnParallel(self._product(rows, hidden), make(rows) if config.attention_bias else None),
            make(shape.query_rank) if shape.query_rank else None,
            ColumnParallel(self._product(query, shape.query_rank)) if shape.query_rank else None,
            make(shape.rank), make(heads, shape.nope_dim + shape.value_dim, shape.rank),
            RowParallel(self._product(hidden, heads * shape.value_dim), self.ranks, make(hidden) if config.output_bias else None),
            num_heads=heads, shape=shape, scale=config.softmax_scale, cos_sin=self.cos_sin,
        )

    def _feed_forward(self, index: int) -> FeedForward | Experts:
        experts = self.config.experts
        if experts is None or not experts.in_layer(index):
            return self._dense(self.config.intermediate_size)
        make, hidden, inner = self._make, self.config.hidden_size, self.ranks.share(experts.size, "the size of an expert")
        return Experts(
            make(experts.count, hidden), Grouped(self._product(experts.count, 2 * inner, hidden)),
            Grouped(self._product(experts.count, hidden, inner)), experts.routing, self.config.activation,
            bias=torch.empty(experts.count, device=self.device, dtype=torch.float32) if experts.bias else None,
            shared=self._dense(experts.shared_size) if experts.shared_size else None,
        )

    def _dense(self, size: int) -> FeedForward:
        make, hidden, inner = self._product, self.config.hidden_size, self.ranks.share(size, "intermediate_size")
        return FeedForward(ColumnParallel(make(2 * inner, hidden)), RowParallel(make(hidden, inner), self.ranks), self.config.activation)

    def sources(self) -> Iterator[Source]:
        """Every checkpoint tensor that the model needs, and its place."""
        return sources.of_model(self)

    def num_parameters(self) -> int:
        """Of the whole model, over all ranks."""
        return sum(source.size() for source in self.sources())

    def parameters_of_a_token(self) -> int:
        """How many of them one token's way through the model takes on one rank: of the experts only the chosen ones."""
        taken, experts = self.num_parameters(), self.config.experts
        if experts is not None:
            idle = sum(isinstance(layer.feed_forward, Experts) for layer in self.layers) * (experts.count - experts.routing.chosen)
            taken -= idle * 3 * experts.size * self.config.hidden_size
        return taken // self.ranks.size

    def embed(self, ops: Any, token_ids: Tensor) -> Tensor:
        """int32[T] -> [T, H]: what the first layer is given."""
        residual = self.embedding.forward(ops, token_ids)
        return residual.mul_(self._embedding_scale) if self._embedding_scale != 1.0 else residual

    def forward(self, ops: Any, step: StepInputs, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Hidden states [T, H] after the last norm, or [M, H] of step.wanted. caches: K and V of every layer, written and read in place.

        Of other tokens the last layer computes no more than what it leaves in its cache and asks of it: 3 % of 32 layers' products.
        """
        wanted = step.wanted
        if ops.one_row and step.token_ids.shape[0] == 1:
            only_one = one_row.forward(self, ops, step, caches)
            return only_one if wanted is None else only_one.index_select(0, wanted)
        if self.folded:
            return folded.forward(self, ops, step, caches)
        eps = self.config.rms_norm_eps
        residual = self.embed(ops, step.token_ids)
        first = self.layers[0]
        rows = activations(first.attention)
        x = ops.rms_norm_rows(residual, first.attention_norm, eps, rows) if rows else ops.rms_norm(residual, first.attention_norm, eps)
        for index, layer in enumerate(self.layers):
            following = self.layers[index + 1] if index + 1 < len(self.layers) else None
            only = wanted if following is None else None
            x = layer.attention.forward(ops, x, step, *caches[index], only)
            residual = residual if only is None else residual.index_select(0, only)
            x = self.add(ops, x, layer.post_attention_norm, residual, layer.feed_forward_norm, activations(layer.feed_forward))
            x = layer.feed_forward.forward(ops, x)
            norm = self.norm if following is None else following.attention_norm
            rows = None if following is None else activations(following.attention)
            x = self.add(ops, x, layer.post_feed_forward_norm, residual, norm, rows)
        return x

    def add(
        self, ops: Any, x: Tensor, own_norm: Tensor | None, residual: Tensor, next_norm: Tensor, rows: torch.dtype | None = None
    ) -> Tensor | Rows:
        """A block's summand x [T, H] into the residual, by its own norm where it has one; the sum normed for the next block.

        rows: the 8-bit type in which the next block takes its input, if it does.
        """
        eps = self.config.rms_norm_eps
        if rows is not None:
            summand = self.ranks.all_reduce(x) if own_norm is None else ops.rms_norm(self.ranks.all_reduce(x), own_norm, eps)
            return ops.add_rms_norm_rows(summand, residual, next_norm, eps, rows)  # type: ignore[no-any-return]
        if own_norm is None:
            return self.ranks.add_rms_norm(ops, x, residual, next_norm, eps)
        return ops.add_rms_norm(ops.rms_norm(self.ranks.all_reduce(x), own_norm, eps), residual, next_norm, eps)  # type: ignore[no-any-return]

    def logits(self, ops: Any, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, H] -> [B, V] in the model's dtype. out: see local_logits."""
        return self.head.whole(self.local_logits(ops, hidden, out))

    def local_logits(self, ops: Any, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, H] -> [B, V / size], of this rank's tokens. out: where to put them, contiguous."""
        logits, cap = self.head.local(ops, hidden, out), self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits
