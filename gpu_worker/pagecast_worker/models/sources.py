"""The checkpoint tensors of a decoder, part by part, by its family's table of names."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from pagecast_worker.layers.attention import Attention
from pagecast_worker.layers.experts import Experts
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.latent_attention import LatentAttention
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.names import Names
from pagecast_worker.models.weights import Source, named, reordered, rotary_order
from pagecast_worker.parallel import Part, Ranks

if TYPE_CHECKING:
    from pagecast_worker.models.decoder import Decoder, Layer


class _Table:
    """Makes sources of one model's or layer's parts."""

    def __init__(self, names: Names, prefix: str) -> None:
        self._names, self._prefix = names, prefix

    def of_expert(self, expert: int) -> "_Table":
        """The same table for one expert's parts: {e} in their names is its number."""
        names = {part: self._names[part] for part in ("expert_gate", "expert_up", "expert_down")}
        return _Table({part: str(name).format(e=expert) for part, name in names.items()}, self._prefix)

    def whole(self, part: str, parameter: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Source:
        """A parameter that every rank holds all of."""
        name, shape, take = named(self._names, part, self._prefix, *parameter.shape)
        return Source(name, shape, parameter, take=take, change=change)

    def split(
        self, part: str, count: int, parameter: Tensor, held: Part, *, row: int = 0, change: Callable[[Tensor], Tensor] | None = None,
        expert: int | None = None,
    ) -> Source:  # fmt: skip
        """A part that is `count` long over all ranks where `held` splits it; this rank's begins at `row` of the parameter, or of one
        expert's there."""
        whole = [*(parameter.shape if expert is None else parameter.shape[1:])]
        whole[held.dim] = count
        name, shape, take = named(self._names, part, self._prefix, *whole)
        return Source(name, shape, parameter, row, held, take, change, expert)


def of_model(model: "Decoder") -> Iterator[Source]:
    """Every checkpoint tensor that a model needs, and its place."""
    config, table = model.config, _Table(model.names, "")
    yield table.split("embedding", config.vocab_size, model.embedding.weight, model.vocabulary)
    if not config.tie_word_embeddings:
        yield table.split("head", config.vocab_size, model.head.weight, model.vocabulary)
    yield table.whole("norm", model.norm, _offset(config))
    prefix = model.names["layer"]
    assert isinstance(prefix, str)
    for index, layer in enumerate(model.layers):
        yield from _of_layer(model, _Table(model.names, prefix.format(i=index)), layer)


def _of_layer(model: "Decoder", table: _Table, layer: "Layer") -> Iterator[Source]:
    change = _offset(model.config)
    for part in ("attention_norm", "feed_forward_norm", "post_attention_norm", "post_feed_forward_norm"):
        weight: Tensor | None = getattr(layer, part)
        if weight is not None:
            yield table.whole(part, weight, change)
    if isinstance(layer.attention, LatentAttention):
        yield from _of_latent_attention(model, table, layer.attention)
    else:
        yield from _of_attention(model, table, layer.attention)
    if isinstance(layer.feed_forward, Experts):
        yield from _of_experts(model, table, layer.feed_forward)
    else:
        yield from _of_feed_forward(table, layer.feed_forward, model.config.intermediate_size, model.ranks)


def _of_attention(model: "Decoder", table: _Table, attention: Attention) -> Iterator[Source]:
    config, part, qkv, turn = model.config, model.ranks.part, attention.qkv, _turn(model.config)
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    row = 0
    for name, rows, copies, change in (("q", query, 1, turn), ("k", key, model.kv_copies, turn), ("v", key, model.kv_copies, None)):
        held = part(0, rows, "the rows of heads", copies)
        yield table.split(name, rows, qkv.weight, held, row=row, change=change)
        if qkv.bias is not None:
            yield table.split(f"{name}_bias", rows, qkv.bias, held, row=row, change=change)
        row += held.size
    yield table.split("o", query, attention.output.weight, part(1, query, "num_attention_heads"))
    if attention.output.bias is not None:
        yield table.whole("o_bias", attention.output.bias)
    for name, weight in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        if weight is not None:
            yield table.whole(name, weight, turn or _offset(config))


def _of_latent_attention(model: "Decoder", table: _Table, block: LatentAttention) -> Iterator[Source]:
    config, shape, part, down = model.config, block.shape, model.ranks.part, block.down
    query = config.num_heads * (shape.nope_dim + shape.rope_dim)
    turn_query, turn_key = (_turn_end(config, start) for start in (shape.nope_dim, shape.rank))
    if block.query is None or block.query_norm is None:
        held = part(0, query, "num_attention_heads")
        yield table.split("q", query, down.weight, held, change=turn_query)
        row = held.size
    else:
        row, whole = shape.query_rank, Part(0, 0, shape.query_rank)
        yield table.split("q_down", row, down.weight, whole)
        if down.bias is not None:
            yield table.split("q_down_bias", row, down.bias, whole)
        yield table.whole("q_down_norm", block.query_norm)
        yield table.split("q_compressed", query, block.query.weight, part(0, query, "num_attention_heads"), change=turn_query)
    size = shape.rank + shape.rope_dim
    yield table.split("kv_down", size, down.weight, Part(0, 0, size), row=row, change=turn_key)
    if down.bias is not None:
        yield table.split("kv_down_bias", size, down.bias, Part(0, 0, size), row=row, change=turn_key)
    yield table.whole("kv_down_norm", block.latent_norm)
    up = config.num_heads * (shape.nope_dim + shape.value_dim)
    yield table.split("kv_up", up, block.up.flatten(0, 1), part(0, up, "num_attention_heads"))
    values = config.num_heads * shape.value_dim
    yield table.split("o", values, block.output.weight, part(1, values, "num_attention_heads"))
    if block.output.bias is not None:
        yield table.whole("o_bias", block.output.bias)


def _turn_end(config: ModelConfig, start: int) -> Callable[[Tensor], Tensor] | None:
    """What is done to rows whose heads (or whole) are rotated from element `start` on."""
    assert config.latent is not None
    if not config.interleaved:
        return None
    half = config.latent.rope_dim // 2
    pairs = [start + 2 * i for i in range(half)]
    return reordered([*range(start), *pairs, *(place + 1 for place in pairs)])


def _of_feed_forward(table: _Table, block: FeedForward, inner: int, ranks: Ranks, prefix: str = "") -> Iterator[Source]:
    """prefix: of the parts' names, for a block beside the usual one."""
    held = ranks.part(0, inner, "intermediate_size")
    for place, part in enumerate(("gate", "up")):
        yield table.split(prefix + part, inner, block.gate_up.weight, held, row=place * held.size)
    yield table.split(prefix + "down", inner, block.down.weight, ranks.part(1, inner, "intermediate_size"))


def _of_experts(model: "Decoder", table: _Table, block: Experts) -> Iterator[Source]:
    config = model.config.experts
    assert config is not None
    yield table.whole("router", block.router)
    if block.bias is not None:
        yield table.whole("router_bias", block.bias)
    if block.shared is not None:
        yield from _of_feed_forward(table, block.shared, config.shared_size, model.ranks, "shared_")
    rows, columns = (model.ranks.part(dim, config.size, "the size of an expert") for dim in (0, 1))
    for expert in range(config.count):
        own = table.of_expert(expert)
        for place, part in enumerate(("expert_gate", "expert_up")):
            yield own.split(part, config.size, block.gate_up.weight, rows, row=place * rows.size, expert=expert)
        yield own.split("expert_down", config.size, block.down.weight, columns, expert=expert)


def _offset(config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    """What is done to norm weights."""
    return (lambda weight: weight.float() + config.norm_offset) if config.norm_offset else None


def _turn(config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    """What is done to rows of q and k."""
    order = rotary_order(config)
    return reordered(order) if order is not None else None
