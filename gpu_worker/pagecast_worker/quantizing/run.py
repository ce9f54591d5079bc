"""One run of `pagecast quantize`: layer by layer, each on what the quantized layers before it give."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.checkpoint import Checkpoint
from pagecast_worker.loading.load import load_model, open_checkpoint
from pagecast_worker.loading.products import kept_plain, products_of
from pagecast_worker.loading.random import RandomWeights
from pagecast_worker.loading.stored import Stored, is_quantized, read, rounded
from pagecast_worker.models.decoder import Decoder, Layer
from pagecast_worker.models.names import Piece
from pagecast_worker.models.registry import architecture
from pagecast_worker.models.weights import Source
from pagecast_worker.parallel import Ranks
from pagecast_worker.quantizing import formats, rounding
from pagecast_worker.quantizing.calibration import Calibration, Inputs, Weight
from pagecast_worker.quantizing.folder import OutFolder, Shard, config_of

CALIBRATED = ("awq", "gptq")
"""Methods that need calibration tokens; fp8 uses them where there are any."""
FEWEST_TOKENS = 16
"""Of calibration, that a weight must have met for errors to be weighed by them."""
Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """sequences: calibration tokens, all of one length; empty for methods that need none. device: as for a worker."""

    model: Path
    out: Path
    method: str
    group: int
    sequences: list[list[int]]
    device: torch.device

    @property
    def calibrated(self) -> bool:
        """Whether the model has to be run."""
        return self.method in CALIBRATED or bool(self.sequences)

    def what(self, identity: str) -> dict[str, Any]:
        digest = hashlib.sha256(repr(self.sequences).encode()).hexdigest()
        return {"model": identity, "method": self.method, "group_size": self.group, "calibration": digest}


def quantize(job: Job, report: Report) -> None:
    """Raises LoadError. report: files done, files in all, and what is being done."""
    config = WorkerConfig(run_dir="/unused", model=str(job.model), device=str(job.device))
    checkpoint = open_checkpoint(config, job.device)
    assert not isinstance(checkpoint, RandomWeights)
    if checkpoint.scheme is not None:
        raise LoadError(f"{job.model}: is quantized already ({checkpoint.scheme.name})")
    dtype = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    if job.calibrated:
        model = load_model(config, checkpoint, Ranks(), job.device, dtype, lambda progress: report(0, 1, "reading the model")).model
    else:
        names = architecture(checkpoint.config.architecture).names
        model = Decoder(checkpoint.config, names, Ranks(), torch.device("meta"), dtype, 16)
    values = config_of(job.model, checkpoint.config)
    out = OutFolder(job.out, len(model.layers) + 1, job.what(checkpoint.identity()))
    run = _Run(job, checkpoint, model, out)
    run.all_layers(report)
    values |= {"quantization_config": formats.quantization_config(job.method, job.group, sorted(run.plain)), "dtype": run.dtype_name}
    values.pop("torch_dtype", None)
    out.finish(values, job.model)
    report(len(model.layers) + 1, len(model.layers) + 1, "done")


class _Run:
    """plain: layers that stay as they are, as the format names them."""

    def __init__(self, job: Job, checkpoint: Checkpoint, model: Decoder, out: OutFolder) -> None:
        self._job, self._checkpoint, self._model, self._out = job, checkpoint, model, out
        self.plain: set[str] = set() if model.config.tie_word_embeddings else {"lm_head"}
        prefix, self._layers = str(model.names["layer"]), {}
        sources = list(model.sources())
        for index in range(len(model.layers)):
            self._layers[index] = [source for source in sources if source.name.startswith(prefix.format(i=index))]
        inside = {id(source) for own in self._layers.values() for source in own}
        self._rest = [source for source in sources if id(source) not in inside]
        first = checkpoint.raw(self._rest[0].name).dtype
        self._dtype = torch.bfloat16 if first == torch.bfloat16 else torch.float16
        self.dtype_name = str(self._dtype).removeprefix("torch.")

    def all_layers(self, report: Report) -> None:
        total, job = len(self._layers) + 1, self._job
        report(0, total, "embedding and head")
        if self._out.read(0) is None:
            self._out.write(0, {source.name: self._plain(self._whole(source)) for source in self._rest})
        calibration = None
        if job.calibrated:
            calibration = Calibration(self._model, _operators(job.device), job.sequences)
        for index, sources in self._layers.items():
            report(index + 1, total, f"layer {index + 1} of {len(self._layers)}")
            layer, done = self._model.layers[index], self._out.read(index + 1)
            weights = self._weights(layer, sources)
            self.plain |= {s.name.removesuffix(".weight") for s in sources if len(s.shape) == 2 and s.name not in weights}
            if done is None:
                made, changed = self._make(layer, sources, weights, calibration)
                tensors = {name: self._plain(value) for name, value in changed.items()}
                for name, stored in made.items():
                    parts = formats.tensors_of(stored, job.method, self._dtype)
                    tensors |= {f"{name.removesuffix('.weight')}.{ending}": value for ending, value in parts.items()}
                self._out.write(index + 1, tensors)
                done = self._out.read(index + 1)
            if calibration is not None and done is not None:
                self._take(done, sources)
                calibration.advance(layer)

    def _weights(self, layer: Layer, sources: list[Source]) -> dict[str, Weight]:
        """The checkpoint's names of a layer's weights to quantize, and the parameter that each of them fills a part of."""
        kept = kept_plain(self._model.layers, self._job.method)
        blocks = [product.layer.weight for product in products_of(layer) if id(product.layer) not in kept]
        wanted = {id(weight): weight for weight in blocks if isinstance(weight, Tensor)}
        found = {s.name: (wanted[id(s.parameter)], s.expert) for s in sources if id(s.parameter) in wanted and len(s.shape) == 2}
        for source in sources:
            if source.name in found:
                formats.check_shape(self._job.method, self._job.group, source.name, *source.shape)
        return found

    def _make(
        self, layer: Layer, sources: list[Source], weights: dict[str, Weight], calibration: Calibration | None
    ) -> tuple[dict[str, Stored], dict[str, Tensor]]:
        """The layer's quantized weights, and its other tensors, by the checkpoint's names."""
        job, device = self._job, self._job.device
        whole = {source.name: self._whole(source).to(device) for source in sources}
        if calibration is None:
            make = self._nearest if job.method == "rtn-int4" else self._eight_bits
            return {name: make(whole.pop(name), name) for name in weights}, whole
        kinds = {(id(weight), expert): (weight, expert) for weight, expert in weights.values()}
        inputs = dict(zip(kinds, calibration.inputs(layer, list(kinds.values())), strict=True))
        given = {name: inputs[id(weight), expert] for name, (weight, expert) in weights.items()}
        if job.method == "awq":
            self._scale(whole, given)
            return {name: rounding.asymmetric(whole.pop(name).float(), job.group, name) for name in weights}, whole
        return {name: self._calibrated(whole.pop(name), given[name], name) for name in weights}, whole

    def _calibrated(self, weight: Tensor, given: Inputs, name: str) -> Stored:
        """By GPTQ; an expert that was hardly ever chosen is rounded to the nearest."""
        eight = self._job.method == "fp8"
        if given.tokens < FEWEST_TOKENS:
            return self._eight_bits(weight, name) if eight else self._nearest(weight, name)
        if eight:
            return rounding.gptq_fp8(weight, given.hessian, name)
        return rounding.gptq(weight, given.hessian, self._job.group, self._dtype, name)

    def _nearest(self, weight: Tensor, name: str) -> Stored:
        return rounding.nearest(weight, self._job.group, self._dtype, name)

    def _eight_bits(self, weight: Tensor, name: str) -> Stored:
        return rounded(weight, "fp8", 0, name)

    def _scale(self, whole: dict[str, Tensor], given: dict[str, Inputs]) -> None:
        """AWQ: moves size from columns that meet large inputs' errors into what makes those inputs, in place of `whole`."""
        config, names = self._model.config, self._model.names
        prefix = next(iter(given)).split(".self_attn.")[0].split(".mlp.")[0] + "."
        if any(isinstance(names[part], Piece) for part in ("q", "k", "v", "o", "gate", "up", "down")):
            raise LoadError(f"to must be gptq, rtn-int4 or fp8 for {config.architecture}, whose projections are fused, got awq")
        name = lambda part: prefix + str(names[part])
        pairs = [("attention_norm", ("q", "k", "v")), ("feed_forward_norm", ("gate", "up")), ("up", ("down",))]
        pairs += [("shared_up", ("shared_down",))] if "shared_up" in names else []
        if config.num_heads == config.num_kv_heads:
            pairs.append(("v", ("o",)))
        every = [(name(before), [name(part) for part in after]) for before, after in pairs if {before, *after} <= set(names)]
        for expert in range(config.experts.count if config.experts is not None else 0):
            every.append((name("expert_up").format(e=expert), [name("expert_down").format(e=expert)]))
        for maker, users in every:
            if any(user not in given for user in users) or not given[users[0]].tokens:
                continue
            inputs = given[users[0]]
            mean = inputs.magnitude / inputs.tokens
            scales = rounding.awq_scales([whole[user].float() for user in users], inputs.hessian, mean, self._job.group)
            for user in users:
                whole[user] = whole[user].float() * scales
            before = whole[maker].float()
            if before.dim() == 1:
                whole[maker] = (before + config.norm_offset) / scales - config.norm_offset
                continue
            whole[maker] = before / scales.unsqueeze(1)
            if maker == name("v") and name("v_bias") in whole:
                whole[name("v_bias")] = whole[name("v_bias")].float() / scales

    def _take(self, shard: Shard, sources: list[Source]) -> None:
        """Fills the layer with what was written of it, so that the next layer meets its errors."""
        names = set(shard.names())
        scheme = formats.scheme_of(self._job.method, self._job.group)
        for source in sources:
            layer = source.name.removesuffix(".weight")
            if is_quantized(scheme, names, layer):
                value = read(shard, scheme, names, layer, source.shape, torch.device("cpu")).dense(torch.float32)
            else:
                value = shard.raw(source.name)
            if source.take is not None:
                value = value[source.take[0] : source.take[1]]
            value = value if source.change is None else source.change(value)
            source.place().copy_(value)

    def _whole(self, source: Source) -> Tensor:
        return self._checkpoint.tensor(source.name, source.shape)

    def _plain(self, value: Tensor) -> Tensor:
        return value.to(self._dtype).cpu().contiguous()


def _operators(device: torch.device) -> Any:
    """The plain operators, on whatever device: calibration is a matter of minutes, and these need no scratch memory."""
    from types import SimpleNamespace

    from pagecast_kernels import reference
    from pagecast_worker import cpu_ops

    return SimpleNamespace(**vars(cpu_ops if device.type == "cpu" else reference) | {"one_row": False})
