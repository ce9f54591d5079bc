"""From a path to a model whose weights are on the device."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from llguidance import LLTokenizer
from torch import Tensor

from pagecast_wire.intake import LoadProgress
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError, ReportProgress
from pagecast_worker.loading import streaming
from pagecast_worker.loading.checkpoint import Checkpoint, check_names
from pagecast_worker.loading.gguf import GgufCheckpoint
from pagecast_worker.loading.products import Quantizer, kept_plain, products_to_fill, rounds_head
from pagecast_worker.loading.random import RandomWeights
from pagecast_worker.loading.safetensors import SafetensorsCheckpoint
from pagecast_worker.loading.stored import KV_SCALES, Stored, wanted_names
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.models.registry import architecture
from pagecast_worker.models.weights import Source
from pagecast_worker.outset import check_model, max_model_len
from pagecast_worker.parallel import Ranks
from pagecast_worker.vocabulary import load_vocabulary

LEFT_OVER = (".rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that some checkpoints carry and nothing reads: angles are computed, and a tied head is the embedding."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to compute, and the hex digest of what it was made from."""

    model: Decoder
    digest: str


def open_checkpoint(config: WorkerConfig, device: torch.device) -> Checkpoint | RandomWeights:
    """Reads headers and configuration only. Raises LoadError."""
    if config.random_weights is not None:
        return RandomWeights(Path(config.random_weights), device)
    path = Path(config.model)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.is_file():
        raise LoadError(f"{path}: no such file or folder")
    return GgufCheckpoint(path)


def open_vocabulary(config: WorkerConfig, checkpoint: Checkpoint | RandomWeights) -> LLTokenizer:
    """For structured output; made-up weights may borrow one. Raises VocabularyError."""
    fields = checkpoint.metadata if isinstance(checkpoint, GgufCheckpoint) else None
    shape = checkpoint.config
    return load_vocabulary(Path(config.model), shape.vocab_size, shape.eos_token_ids, fields)


def check_split(model: ModelConfig, ranks: Ranks) -> None:
    """Raises LoadError, naming the field, where the model cannot be split over so many ranks."""
    ranks.share(model.num_heads, "num_attention_heads")
    ranks.copies(model.kv_shape()[0], "num_key_value_heads")
    ranks.share(model.intermediate_size, "intermediate_size")
    if model.experts is not None:
        ranks.share(model.experts.size, "the size of an expert")
    ranks.vocabulary(model.vocab_size)


def load_model(
    config: WorkerConfig, checkpoint: Checkpoint | RandomWeights, ranks: Ranks, device: torch.device, dtype: torch.dtype,
    report: ReportProgress,
) -> Loaded:  # fmt: skip
    """Allocate and fill. Reports bytes of weights under phase "weights". Options that do not fit raise LoadError before any is read."""
    check_model(config, checkpoint.config, checkpoint.scheme, "cuda" if device.type == "cuda" else "cpu", dtype.itemsize)
    family, longest = architecture(checkpoint.config.architecture), max_model_len(config, checkpoint.config)
    quantizer = None
    if config.quantization is not None or checkpoint.scheme is not None:
        quantizer = Quantizer(config.quantization, checkpoint.scheme, device, dtype)
    kinds = {"quantized": quantizer is not None, "quantized_head": rounds_head(config.quantization)}
    model = Decoder(checkpoint.config, family.names, ranks, device, dtype, longest, **kinds)
    if quantizer is not None:
        quantizer.kept = kept_plain(model.layers, config.quantization)
    sources = list(model.sources())
    names = set() if isinstance(checkpoint, RandomWeights) else set(checkpoint.names())
    if not isinstance(checkpoint, RandomWeights):
        if ranks.rank == 0:
            checkpoint.verify()
        past = (f"{family.names['layer']}".format(i=checkpoint.config.num_layers),) if family.extra_layers else ()
        wanted = wanted_names(checkpoint.scheme, names, [source.name for source in sources])
        check_names(checkpoint, wanted, (*LEFT_OVER, *KV_SCALES), (*past, *family.ignored))
    products = {id(p.layer.weight): p for p in products_to_fill(model, config.quantization)} if quantizer is not None else {}
    total = sum(source.held() for source in sources) * dtype.itemsize
    done = 0

    def note(values: int) -> None:
        nonlocal done
        done += values * dtype.itemsize
        report(LoadProgress(rank=config.rank, phase="weights", done=done, total=total))

    if isinstance(checkpoint, SafetensorsCheckpoint) and quantizer is None and device.type == "cuda":
        sources = _stream(checkpoint, sources, device, note)
    for source in sources:
        product = products.get(id(source.parameter))
        part: Stored | Tensor | None = None
        if isinstance(checkpoint, RandomWeights):
            part = checkpoint.made(source, device) if product is not None else checkpoint.fill(source)
        else:
            part = quantizer.stored(checkpoint, names, source) if quantizer is not None else None
            part = _part(checkpoint, source) if part is None else part
        if product is not None and quantizer is not None and part is not None:
            quantizer.add(product, part, source)
        elif part is not None:
            plain = part.dense(dtype) if isinstance(part, Stored) else part
            source.place().copy_(plain)
        note(source.held())
    if config.kv_cache_dtype == "fp8":
        scale_cache(model, checkpoint, names)
    return Loaded(model, _digest(config, checkpoint.identity()))


def _stream(checkpoint: SafetensorsCheckpoint, sources: list[Source], device: torch.device, note: Callable[[int], None]) -> list[Source]:
    """Fill what can go from the files to the device piece by piece; the rest is returned. note: told how many values came."""
    where = streaming.extents(checkpoint.paths)
    fast = [source for source in sources if streaming.streamable(source, where.get(source.name))]
    streaming.Stream(device).fill(streaming.pieces(fast, where), lambda piece: note(piece.place().numel()))
    return [source for source in sources if not streaming.streamable(source, where.get(source.name))]


def _digest(config: WorkerConfig, identity: str) -> str:
    """Of what the model computes: the checkpoint, and what its weights and cache are rounded to."""
    if config.quantization is None and config.kv_cache_dtype == "auto":
        return identity
    return hashlib.sha256(f"{identity} {config.quantization} {config.kv_cache_dtype}".encode()).hexdigest()


def scale_cache(model: Decoder, checkpoint: Checkpoint | RandomWeights, names: set[str]) -> None:
    """Gives every layer the scales of its 8-bit cache: those that the checkpoint has, else 1. Raises LoadError."""
    heads, prefix = model.config.num_kv_heads, str(model.names["layer"])
    for index, layer in enumerate(model.layers):
        for part, older in (("k_scale", "k_proj.output_scale"), ("v_scale", "v_proj.output_scale")):
            scale = torch.ones(heads)
            for name in (f"self_attn.{part}", f"self_attn.attn.{part}", f"self_attn.{older}"):
                whole = prefix.format(i=index) + name
                if whole in names and not isinstance(checkpoint, RandomWeights):
                    scale = checkpoint.raw(whole).float().flatten()
                    if scale.numel() not in (1, heads) or not bool((scale > 0).all()):
                        raise LoadError(f"{checkpoint.file_of(whole)}: tensor {whole} must hold 1 or {heads} scales above 0")
            held = model.ranks.part(0, heads, "num_key_value_heads", model.kv_copies)
            layer.attention.kv_scales[part] = held.of(scale.expand(heads)).contiguous().to(model.device)


def _part(checkpoint: Checkpoint, source: Source) -> Tensor:
    """This rank's part of a checkpoint tensor, as its parameter holds it."""
    value = checkpoint.tensor(source.name, source.shape)
    if source.take is not None:
        value = value[source.take[0] : source.take[1]]
    if source.change is not None:
        value = source.change(value)
    return value if source.part is None else source.part.of(value)
