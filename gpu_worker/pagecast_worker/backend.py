"""What differs between a CPU and a GPU: operators, number type, staging, and whether steps are captured as graphs."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.group import Group
from pagecast_worker.layers.latent_attention import LatentAttention
from pagecast_worker.layers.quantized import CpuQuantized, GpuQuantized
from pagecast_worker.loading.checkpoint import dtype_named
from pagecast_worker.loading.products import products_of
from pagecast_worker.models import folded, one_row
from pagecast_worker.models.config import ModelConfig
from pagecast_worker.models.decoder import Decoder
from pagecast_worker.staging import Staging

BFLOAT16_GAIN = 0.8
"""On a CPU bfloat16 is taken where its products need less than this share of float32's time; the margin keeps the choice stable."""
DTYPE_FILE = "worker.dtype"
"""In the run directory: the number type that `auto` meant on this CPU."""


class Backend:
    """One device's ways. ops: every operator of pagecast_kernels under its name."""

    ops: Any
    staging: Staging

    def __init__(self, config: WorkerConfig, device: torch.device, shape: ModelConfig, group: Group | None = None) -> None:
        """group: the other ranks, where there are any."""
        self.device = device
        self.config = config
        self.is_cuda = device.type == "cuda"
        if device.index is not None and self.is_cuda:
            torch.cuda.set_device(device)  # Triton launches on the current device
        self.dtype = dtype_named(group.agreed("dtype", lambda: self._dtype_name(shape)) if group else self._dtype_name(shape))
        self.use_graphs = self.is_cuda and not config.enforce_eager and (group is None or group.is_device)
        self.measured_products = False
        self.clear_blocks = not self.is_cuda
        """Kernels mask what lies beyond a row's length; the CPU's products over whole blocks need finite values there."""

    def _dtype_name(self, shape: ModelConfig) -> str:
        if self.config.dtype != "auto":
            return self.config.dtype
        return "bfloat16" if self.is_cuda else chosen_once(Path(self.config.run_dir) / DTYPE_FILE, lambda: faster_dtype(shape))

    def prepare(self, model: Decoder) -> None:
        """Operators and staging for a loaded model."""
        if self.is_cuda:
            from pagecast_kernels import products
            from pagecast_worker.cuda_staging import CudaStaging

            fold_norms(self.config, model)
            self.measured_products = products.prepare(self.device)
            self.ops = cuda_operators(self.config, model, self.device)
            self.staging = CudaStaging(self.device, self.config.max_num_seqs)
        else:
            from pagecast_worker import cpu_ops
            from pagecast_worker.host_staging import HostStaging

            self.ops = SimpleNamespace(**vars(cpu_ops)) if is_quantized(model) else cpu_ops
            if is_quantized(model):
                vars(self.ops).update(products_over(CpuQuantized(cpu_ops)))
            self.staging = HostStaging()

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def device_named(name: str, rank: int | None = None) -> torch.device:
    """The device of "auto", "cpu", "cuda" or "cuda:N". Without a number, ranks (None: there is only this) take a host's GPUs in turn.

    Raises LoadError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise LoadError(f"device {name} is not available here")
    if device.type == "cuda" and device.index is None and rank is not None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def fold_norms(config: WorkerConfig, model: Decoder) -> None:
    """Does so where the model is one to gain by it and its rows may depend on their company, as a library's sums do."""
    if config.fold_norms and not config.batch_invariant and folded.suits(model):
        folded.fold(model)


def cuda_operators(config: WorkerConfig, model: Decoder, device: torch.device) -> Any:
    """The Triton operators, with scratch memory that graphs can hold on to where they take some; products of several rows by cuBLAS."""
    from pagecast_kernels import products, triton_ops
    from pagecast_kernels.gemv import norm_gemv, norm_gemv_heads, norm_gemv_silu_mul

    scratch = _scratch(config, model, device)

    linear = products.linear

    def linear_gelu_mul(x: Tensor, weight: Tensor) -> Tensor:
        return triton_ops.gelu_mul(linear(x, weight))

    one_row_ops = {"norm_linear": norm_gemv, "norm_linear_heads": norm_gemv_heads, "norm_linear_silu_mul": norm_gemv_silu_mul}
    names = (
        "rms_norm", "add_rms_norm", "silu_mul", "gelu_mul", "embedding", "rope_and_write_kv", "paged_prefill", "copy_blocks", "gather_rows",
        "gather_padded", "finish_rows", "best_of_shard", "latent_rope_and_write", "latent_prefill",
        "adjust_logits", "forbid_tokens", "note_tokens", "top_logprobs",
    )  # fmt: skip
    ops = SimpleNamespace(
        **{name: getattr(triton_ops, name) for name in names},
        **{name: partial(getattr(triton_ops, name), workspace=workspace) for name, workspace in scratch.items()},
        linear=linear, linear_add=products.linear_add, linear_silu_mul=products.linear_silu_mul, linear_gelu_mul=linear_gelu_mul,
        one_row=one_row.suits(model), **one_row_ops,
    )
    if config.batch_invariant:
        vars(ops).update(invariant_operators(config, model, device, scratch["sample"]))
    if is_quantized(model):
        plain = SimpleNamespace(**vars(ops), dtype=model.dtype)
        vars(ops).update(products_over(GpuQuantized(plain, device)))
    return ops


def invariant_operators(config: WorkerConfig, model: Decoder, device: torch.device, draws: Any) -> dict[str, Any]:
    """Operators by name whose result for a row does not depend on the others, of a model that has no others."""
    from pagecast_kernels import invariant, triton_ops

    linear = invariant.invariant_linear
    return {
        "linear": linear,
        "linear_silu_mul": lambda x, weight: triton_ops.silu_mul(linear(x, weight)),
        "linear_gelu_mul": lambda x, weight: triton_ops.gelu_mul(linear(x, weight)),
        "paged_decode": invariant.InvariantDecode(),
        "sample": partial(triton_ops.sample, workspace=draws, cut_slices=invariant.CUT_SLICES),
        "one_row": False,
    }


def is_quantized(model: Decoder) -> bool:
    """Whether a product's weight is anything but a tensor."""
    weights = [model.head.weight, *(product.layer.weight for layer in model.layers for product in products_of(layer))]
    return not all(isinstance(weight, Tensor) for weight in weights)


def products_over(quantized: Any) -> dict[str, Any]:
    """The operators that an object of layers.quantized offers, by name."""
    return {name: getattr(quantized, name) for name in dir(quantized) if not name.startswith("_")}


def _scratch(config: WorkerConfig, model: Decoder, device: torch.device) -> dict[str, Any]:
    """Scratch memory of the operators that take some, by their names."""
    from pagecast_kernels import triton_ops

    attention, rows, experts = model.layers[0].attention, config.max_num_seqs, model.config.experts
    found: dict[str, Any] = {"sample": triton_ops.sample_workspace(rows, device)}
    if isinstance(attention, LatentAttention):
        found["latent_decode"] = triton_ops.latent_workspace(rows, attention.num_heads, attention.shape.rank, device)
    else:
        heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        found["paged_decode"] = triton_ops.step_workspace(rows, *heads, device)
        found["paged_decode_shared"] = triton_ops.shared_workspace(rows, *heads, device)
    if experts is not None:
        found["mixture"] = triton_ops.experts_workspace(experts.count, device)
    return found


def chosen_once(file: Path, choose: Callable[[], torch.dtype]) -> str:
    """The name of what `choose` gave to the first worker that asked: one that starts again goes on with the numbers of the one before."""
    try:
        return file.read_text()
    except FileNotFoundError:
        name = str(choose()).removeprefix("torch.")
    if file.parent.is_dir():  # else this worker has no supervisor that would start it again
        draft = file.with_suffix(".draft")
        draft.write_text(name)
        draft.replace(file)
    return name


def faster_dtype(shape: ModelConfig) -> torch.dtype:
    """float32 or bfloat16, by timing this model's feed-forward product for one row and for sixteen."""
    spent = {dtype: _products_seconds(shape, dtype) for dtype in (torch.float32, torch.bfloat16)}
    return torch.bfloat16 if spent[torch.bfloat16] < BFLOAT16_GAIN * spent[torch.float32] else torch.float32


def _products_seconds(shape: ModelConfig, dtype: torch.dtype) -> float:
    """Best of five, over enough weights that they come from memory as they do when serving."""
    copies = max(1, (64 << 20) // (2 * shape.hidden_size * shape.intermediate_size * dtype.itemsize))
    weights = [torch.full((2 * shape.intermediate_size, shape.hidden_size), 0.01, dtype=dtype) for _ in range(min(copies, 8))]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for rows in (1, 16):
            x = torch.full((rows, shape.hidden_size), 0.5, dtype=dtype)
            for weight in weights:
                torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - began)
    return best
