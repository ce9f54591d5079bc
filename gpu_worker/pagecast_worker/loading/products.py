"""The weights of a model's products, made quantized one at a time: from what a checkpoint stores, or rounded on the way in.

A product whose weight is quantized is allocated without memory; what replaces it exists whole only for that one product.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pagecast_kernels import quantized_weights
from pagecast_kernels.quantized_weights import (
    DEFAULT_ZEROS,
    TILE_ROWS,
    TILE_WORDS,
    Kind,
    PackedExperts,
    PackedWeight,
    ScaledExperts,
    tile_columns,
)
from pagecast_worker.layers.embedding import Head
from pagecast_worker.layers.experts import Experts, Grouped
from pagecast_worker.layers.feed_forward import FeedForward
from pagecast_worker.layers.linear import ColumnParallel, RowParallel
from pagecast_worker.layers.quantized import ExpertsWeight, Packed, Rounded, Scaled, Weight
from pagecast_worker.loading import stored
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.loading.stored import Stored
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.models.weights import Source

METHODS = ("int4", "fp8")
"""What `--quantization` may name: weights rounded as they are loaded."""
ONLINE_GROUP = 128
_EIGHT = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A layer's product, or the output head's. gated: its rows are gates and ups whose SiLU·mul is all that is made of them."""

    layer: ColumnParallel | RowParallel | Grouped | Head
    gated: bool


def products_of(block: Any) -> Iterator[Product]:
    """Every product within a model's layer whose weight may be quantized. What latent attention brings into and out of its latent
    space with is not a product's weight but taken apart head by head, and a router decides too much to be rounded."""
    if isinstance(block, ColumnParallel | RowParallel):
        yield Product(block, False)
    elif isinstance(block, FeedForward):
        rows = block.gate_up.weight.shape[0]
        yield Product(block.gate_up, block.activation == "silu" and block.gate_up.bias is None and rows % 16 == 0)
        yield Product(block.down, False)
    elif isinstance(block, Experts):
        yield Product(block.gate_up, block.activation == "silu" and block.gate_up.weight.shape[1] % 16 == 0)
        yield Product(block.down, False)
        if block.shared is not None:
            yield from products_of(block.shared)
    elif dataclasses.is_dataclass(block):
        for field in dataclasses.fields(block):
            yield from products_of(getattr(block, field.name))


def kept_plain(layers: list[Any], method: str | None) -> set[int]:
    """ids of the products' layers that stay as they are where weights are rounded to e4m3: the last feed-forward block's.
    Its errors go straight into the logits; in the model of docs/quantization.md it alone costs half of what all products do.
    """
    return {id(product.layer) for product in products_of(layers[-1].feed_forward)} if method == "fp8" else set()


def rounds_head(method: str | None) -> bool:
    """Whether an output head is rounded where layers are, to int8 by row; not one that is the embedding's tensor, which is looked up in."""
    return method == "int4"


def products_to_fill(model: Decoder, method: str | None) -> Iterator[Product]:
    """Every product of a model whose weight is allocated without memory."""
    for layer in model.layers:
        yield from products_of(layer)
    if rounds_head(method) and not model.config.tie_word_embeddings:
        yield Product(model.head, False)


def for_kernels(device: torch.device) -> bool:
    """Whether weights are kept as kernels take them; a CPU multiplies with what they mean."""
    return device.type == "cuda"


class Quantizer:
    """Turns the parts that a product's sources give into its weight. method: of `--quantization`; scheme: the checkpoint's own.

    dtype: the model's, in which weights are kept that stay plain. kept: ids of products' layers that are not rounded.
    """

    def __init__(self, method: str | None, scheme: Scheme | None, device: torch.device, dtype: torch.dtype) -> None:
        self.method, self.scheme, self.device, self.dtype = method, scheme, device, dtype
        self.kept: set[int] = set()
        self._parts: dict[tuple[int, int | None], list[Stored | Tensor]] = {}
        self._experts: dict[int, list[Stored | Tensor]] = {}

    def stored(self, checkpoint: Any, names: set[str], source: Source) -> Stored | None:
        """This rank's part of a source as the checkpoint stores it quantized; None where it has a plain one."""
        layer = source.name.removesuffix(".weight")
        if self.scheme is None or not stored.is_quantized(self.scheme, names, layer):
            return None
        value = stored.read(checkpoint, self.scheme, names, layer, source.shape, self.device)
        if source.take is not None:
            first, last = source.take
            value = value.of_rows(lambda rows: rows[first:last])
        if source.change is not None:
            change = source.change
            value = value.of_rows(lambda rows: change(rows.cpu()).to(self.device))
        return value if source.part is None else value.part(source.part)

    def add(self, product: Product, part: Stored | Tensor, source: Source) -> None:
        """The next rows of a product's weight, or of one expert's. With the last of them the weight is made."""
        shape = product.layer.weight.shape
        key = (id(product.layer), source.expert)
        parts = self._parts.setdefault(key, [])
        parts.append(part)
        if sum((p.values if isinstance(p, Stored) else p).shape[0] for p in parts) < shape[-2]:
            return
        method = None if id(product.layer) in self.kept else "int8" if isinstance(product.layer, Head) else self.method
        whole = self._whole(self._parts.pop(key), method, source.name.removesuffix(".weight"))
        if not isinstance(product.layer, Grouped):
            product.layer.weight = whole if isinstance(whole, Tensor) else self._made(whole, product.gated)
            return
        experts = self._experts.setdefault(id(product.layer), [])
        experts.append(whole)
        if len(experts) == shape[0]:
            product.layer.weight = self._of_experts(self._experts.pop(id(product.layer)), product.gated)

    def _whole(self, parts: list[Stored | Tensor], method: str | None, name: str) -> Stored | Tensor:
        """All rows, rounded now if they have to be; plain where the parts are not alike."""
        whole: Stored | None = None
        if all(isinstance(part, Stored) for part in parts):
            whole = stored.joined([part for part in parts if isinstance(part, Stored)])
        elif method is not None and all(isinstance(part, Tensor) for part in parts):
            dense = torch.cat([part.to(self.device) for part in parts if isinstance(part, Tensor)])
            whole = stored.rounded(dense, method, ONLINE_GROUP, name)
        return torch.cat([self._dense(part) for part in parts]) if whole is None else whole

    def _dense(self, part: Stored | Tensor) -> Tensor:
        return part.dense(self.dtype) if isinstance(part, Stored) else part.to(self.device, self.dtype)

    def _activations(self) -> str:
        """The 8-bit type that x is rounded to before it meets a weight, or nothing."""
        return self.scheme.activations if self.scheme is not None else ("fp8" if self.method == "fp8" else "")

    def _made(self, whole: Stored, gated: bool) -> Weight:
        activations = self._activations()
        if not for_kernels(self.device):
            return Rounded(whole.dense(self.dtype), _EIGHT[activations]) if activations else whole.dense(self.dtype)
        if activations:
            return Scaled(*_eight_bits(whole))
        if not quantized_weights.usable_group(whole.group, whole.values.shape[1]):
            return whole.dense(self.dtype)
        return Packed(_packed(whole, gated), whole.order)

    def _of_experts(self, experts: list[Stored | Tensor], gated: bool) -> ExpertsWeight:
        """The same for all experts' weights: of one form, or all plain."""
        activations, every = self._activations(), [expert for expert in experts if isinstance(expert, Stored)]
        alike = len(every) == len(experts) and len({(one.kind, one.group) for one in every}) == 1
        usable = alike and (activations or quantized_weights.usable_group(every[0].group, every[0].values.shape[1]))
        if not for_kernels(self.device) or not usable:
            dense = torch.stack([self._dense(expert) for expert in experts])
            return Rounded(dense, _EIGHT[activations]) if activations and alike else dense
        if activations:
            values, scales = zip(*(_eight_bits(expert) for expert in every), strict=True)
            return ScaledExperts(torch.stack(values), torch.stack(scales))
        return quantized_weights.stacked([_packed(expert, gated) for expert in every], [expert.order for expert in every])


def _eight_bits(whole: Stored) -> tuple[Tensor, Tensor]:
    """Values in their own type, and a scale for each row."""
    values = whole.values.contiguous()
    signed = values.view(torch.float8_e4m3fn) if whole.kind == "fp8" else (values.to(torch.int16) - 128).to(torch.int8)
    return signed, whole.scales[:, 0].contiguous()


def _packed(whole: Stored, gated: bool) -> PackedWeight:
    zeros = whole.zeros
    if zeros is not None and bool((zeros == DEFAULT_ZEROS[whole.kind]).all()):
        zeros = None
    return quantized_weights.pack(whole.kind, whole.values, whole.scales, zeros, whole.group, gated)


def empty_weight(product: Product, method: str | None, scheme: Scheme | None) -> Weight | ExpertsWeight:
    """What stands for a product's weight where kernels are compiled ahead: of the likely form, without memory."""
    *experts, rows, columns = product.layer.weight.shape
    head = isinstance(product.layer, Head)
    made = lambda *shape, dtype=torch.float32: torch.empty((*experts, *shape), device="meta", dtype=dtype)
    activations = scheme.activations if scheme is not None else ("fp8" if method == "fp8" else "")
    if activations:
        values, row_scales = made(rows, columns, dtype=_EIGHT[activations]), made(rows)
        return ScaledExperts(values, row_scales) if experts else Scaled(values, row_scales)
    group = 0 if head else ONLINE_GROUP if scheme is None else min(scheme.group, 128)
    eight = head or (scheme is not None and scheme.bits == 8)
    kind: Kind = "fp8" if scheme is not None and scheme.form == "fp8" else "int8" if eight else "int4"
    padded = -(-columns // 128) * 128
    row_tiles = -(-rows // TILE_ROWS)
    scales = made(padded // group if group else 1, row_tiles * TILE_ROWS)
    words = made(row_tiles, padded // tile_columns(kind), TILE_WORDS, dtype=torch.int32)
    zeros = scales if scheme is not None and scheme.form == "awq" else None
    whole = (kind, rows, columns, group, words, scales, zeros, product.gated)
    return PackedExperts(*whole) if experts else Packed(PackedWeight(*whole))
