"""Compiles the kernels that a model needs in several processes at once, while its weights are being read.

One layer's steps run on tensors without memory, with a driver that only names the GPU, and what they launch is noted. Compiling it
leaves its result, and the C code that starts it, in triton's cache on disk, where the worker finds them. Each process takes the next
kernel when it has done one, those that take longest first. What goes wrong here costs time only: the worker compiles what it does not
find.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import torch

from pagecast_wire.lifeline import die_with
from pagecast_worker.compilers import MARK, Compilers
from pagecast_worker.config import WorkerConfig
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.models.config import ModelConfig

if TYPE_CHECKING:
    from pagecast_worker.models.decoder import Decoder

MOST_PROCESSES = 12
WAIT_SECONDS = 60.0
LONGEST = (
    "_wide_experts", "_finish_open_rows", "_paged_prefill_hopper", "_paged_decode", "_narrow", "_decode_flat", "_decode_hopper",
    "_decode_hopper_bytes", "_attend_prefix", "_few_rows", "_pick",
)  # fmt: skip
"""Kernels that take several times as long to compile as others, longest first: 2.6 to 0.6 s of processor time, where others take 0.2."""
_NUMBER = 2  # bytes that name a kernel to a process

_log = structlog.get_logger(__name__)


class Precompilation:
    """Processes under way. Made before weights are read, waited for before the first launch. compilers: those that were started before."""

    def __init__(
        self, config: WorkerConfig, shape: ModelConfig, scheme: Scheme | None, dtype: torch.dtype, max_blocks: int, device: torch.device,
        compilers: Compilers | None = None,
    ) -> None:  # fmt: skip
        import triton

        import pagecast_kernels

        properties = torch.cuda.get_device_properties(device)
        request = {
            "shape": dataclasses.asdict(shape) | {"num_layers": layers_to_launch(shape, config.quantization)},
            "dtype": str(dtype).removeprefix("torch."), "max_blocks": max_blocks, "block_size": config.block_size,
            "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
            "ranks": config.tensor_parallel_size,
            "quantization": config.quantization, "scheme": None if scheme is None else dataclasses.asdict(scheme),
            "kv_cache_dtype": config.kv_cache_dtype, "batch_invariant": config.batch_invariant, "fold_norms": config.fold_norms,
            "arch": properties.major * 10 + properties.minor, "processors": properties.multi_processor_count,
            "device_name": properties.name,
        }  # fmt: skip
        folder = Path(str(pagecast_kernels.__file__)).parent
        sources = b"".join(path.read_bytes() for path in sorted([*folder.glob("*.py"), *folder.glob("tables/*.json")]))
        digest = hashlib.sha256(json.dumps([request, triton.__version__]).encode() + sources).hexdigest()
        self._done = Path(triton.knobs.cache.dir) / f"{MARK}{digest[:32]}"
        self._began = time.monotonic()
        self._parts = min(MOST_PROCESSES, (os.cpu_count() or 1) * 3 // 4)
        self._compilers: Compilers | None = None
        if self._parts > 1 and not self._done.exists():
            self._compilers = compilers or Compilers()
            self._compilers.begin(json.dumps(request | {"parts": self._parts}))
        elif compilers is not None:
            compilers.dismiss()

    def wait(self) -> None:
        """Until all have ended, or their time is up."""
        if self._compilers is None:
            return
        if not self._compilers.end(self._began + WAIT_SECONDS - time.monotonic()):
            _log.warning("kernels were not compiled ahead", processes=self._parts)
            return
        self._done.touch()
        _log.info("kernels compiled ahead", processes=self._parts, seconds=round(time.monotonic() - self._began, 1))


def layers_to_launch(shape: ModelConfig, method: str | None) -> int:
    """How many of the first layers launch all that the model's layers do: one of every kind, the last one being another kind where it is
    not rounded; and two that see all tokens, as decode's launch in the second, which finds the list of tiles made, may begin early."""
    every = shape.layers_of_every_kind() + (method == "fp8")
    whole = [layer for layer in range(shape.num_layers) if not shape.window(layer)]
    return min(max([every, *(layer + 1 for layer in whole[1:2])]), shape.num_layers)


def tell_of_compilations() -> None:
    """From here on a kernel that is compiled in this process is named in the log: serving is not to wait for one."""
    import triton

    def told(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            _log.info("kernel compiled in the worker", kernel=src.name, ms=times.total // 1000)

    triton.knobs.compilation.listener = told


def start_precompilation(
    config: WorkerConfig, shape: ModelConfig, scheme: Scheme | None, dtype: torch.dtype, max_blocks: int, device: torch.device,
    compilers: Compilers | None = None,
) -> Precompilation | None:  # fmt: skip
    """scheme: how the checkpoint is quantized. None where there is nothing to compile for, or where it cannot be started."""
    if device.type != "cuda":
        if compilers is not None:
            compilers.dismiss()
        return None
    try:
        tell_of_compilations()
        return Precompilation(config, shape, scheme, dtype, max_blocks, device, compilers)
    except (OSError, RuntimeError, AttributeError) as error:
        _log.warning("kernels are not compiled ahead", error=type(error).__name__)
        if compilers is not None:
            compilers.dismiss()
        return None


def note_launches(arch: int, processors: int) -> list[Callable[[], Any]]:
    """From here on a launch starts nothing. Returns the list of those that differ, to which they are added: each compiles its kernel."""
    from triton.runtime import jit

    from pagecast_kernels import absent_gpu, configs

    absent_gpu.compile_for(arch, processors)
    configs.is_hopper = lambda device: arch == 90  # type: ignore[assignment]
    launch = jit.JITFunction.run
    seen: set[object] = set()
    noted: list[Callable[[], Any]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        values = tuple(_variant(arg, parameter) for arg, parameter in zip(args, self.params, strict=False))
        if (variant := (self.__name__, values, tuple(sorted(options.items())))) not in seen:
            seen.add(variant)
            noted.append(partial(launch, self, *args, grid=grid, warmup=True, **options))

    jit.JITFunction.run = run
    return noted


def in_order(noted: list[Callable[[], Any]]) -> list[int]:
    """The numbers of launches, those first whose kernels take longest to compile."""
    names = [launch.args[0].__name__ for launch in noted]  # type: ignore[attr-defined]
    return sorted(range(len(names)), key=lambda number: LONGEST.index(names[number]) if names[number] in LONGEST else len(LONGEST))


def _variant(arg: Any, parameter: Any) -> object:
    """What of an argument a kernel is compiled for."""
    if isinstance(arg, torch.Tensor):
        return str(arg.dtype)
    if isinstance(arg, tuple):
        return tuple(_variant(one, parameter) for one in arg)
    if parameter.is_constexpr or arg is None:
        return arg
    if parameter.do_not_specialize or not isinstance(arg, int):
        return type(arg)
    return arg == 1, arg % 16 == 0


def _quantize(model: "Decoder", request: dict[str, Any]) -> torch.dtype:
    """Puts quantized weights and scales of the cache where the worker will have them. Returns the cache's type."""
    from pagecast_worker.loading.products import empty_weight, kept_plain, products_to_fill

    scheme = None if request["scheme"] is None else msgspec.convert(request["scheme"], Scheme)
    if request["quantization"] is not None or scheme is not None:
        method = request["quantization"]
        kept = kept_plain(model.layers, method)
        for product in [product for product in products_to_fill(model, method) if id(product.layer) not in kept]:
            product.layer.weight = empty_weight(product, method, scheme)
    if request["kv_cache_dtype"] != "fp8":
        return model.dtype
    for layer in model.layers:
        layer.attention.kv_scales = dict.fromkeys(("k_scale", "v_scale"), torch.empty(model.num_kv_heads, device=model.device))
    return torch.float8_e4m3fn


@torch.inference_mode()
def launch_all(request: dict[str, Any]) -> None:
    """Every launch that the start of a worker makes, on tensors without memory."""
    from pagecast_kernels import products
    from pagecast_worker.backend import cuda_operators, fold_norms
    from pagecast_worker.batch_state import BatchState
    from pagecast_worker.graphs import buckets, sizes_of_sharing, warm_sizes
    from pagecast_worker.kv_cache import KVCache
    from pagecast_worker.memory import logits_of_a_step
    from pagecast_worker.mixed_graphs import sizes_for, view_step
    from pagecast_worker.models.decoder import Decoder
    from pagecast_worker.models.registry import architecture
    from pagecast_worker.parallel import Mute, Ranks
    from pagecast_worker.sharing import sharing_for
    from pagecast_worker.steps import decode_step, padded_step, prefill_step, try_sizes
    from pagecast_worker.token_rules import TokenRules

    device, dtype = torch.device("meta"), getattr(torch, request["dtype"])
    shape = msgspec.convert(request["shape"], ModelConfig)
    config = SimpleNamespace(**{name: request[name] for name in ("block_size", "max_num_seqs", "batch_invariant", "fold_norms")})
    state = BatchState(config.max_num_seqs, request["max_blocks"], device)
    ranks = Ranks(0, request["ranks"], Mute())
    model = Decoder(shape, architecture(shape.architecture).names, ranks, device, dtype, 64)
    kv_dtype = _quantize(model, request)
    cache = KVCache(2, shape.num_layers, model.kv_shape, config.block_size, device, kv_dtype)
    fold_norms(config, model)  # type: ignore[arg-type]
    products.prepare_ours(request["device_name"])
    ops = cuda_operators(config, model, device)  # type: ignore[arg-type]
    rules = TokenRules(config.max_num_seqs, shape.vocab_size, device)
    logits = logits_of_a_step(config.max_num_seqs, model)
    worker: Any = SimpleNamespace(
        config=config, device=device, state=state, model=model, cache=cache, ops=ops, rules=rules, logits=logits
    )
    try_sizes(worker, warm_sizes(config.max_num_seqs))
    if not config.batch_invariant and (sharing := sharing_for(model, dtype)) is not None:
        for size in sizes_of_sharing(buckets(config.max_num_seqs, 0)):
            shared = sharing.view(size, torch.zeros(sharing.words(size), dtype=torch.int32, device=device))
            decode_step(worker, torch.zeros(size, dtype=torch.int32, device=device), shared)
    for mixed in sizes_for(config.max_num_seqs, request["max_num_batched_tokens"], model.parameters_of_a_token(), measured=True):
        padded_step(worker, view_step(mixed, torch.zeros(mixed.words(), dtype=torch.int32, device=device)))
    if shape.experts is not None or model.folded:  # whose launches go by how many tokens there are, in graphs or not
        for power in range(request["max_num_batched_tokens"].bit_length()):
            prefill_step(worker, 1 << power, 1 << power, 1, whole=True)
    products.launch_ours()


def build_launcher(kernel: Any) -> None:
    """The C code that starts a kernel, and that of triton's driver, as the worker would build them one after the other."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    try:
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)
    except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"no launchers: {type(error).__name__}: {error}", file=sys.stderr)  # the kernels are there all the same


def in_parts(request: dict[str, Any]) -> bool:
    """Compiles everything in as many processes as the request says, each a copy of this one. Whether all went well."""
    noted = note_launches(request["arch"], request["processors"])
    launch_all(request)
    parent, children, (left, put) = os.getpid(), [], os.pipe()
    os.set_blocking(put, False)  # more than a pipe holds is an error, not a wait without end
    os.write(put, b"".join(number.to_bytes(_NUMBER) for number in in_order(noted)))
    os.close(put)
    for _ in range(request["parts"]):
        if (child := os.fork()) == 0:
            code = 1
            try:
                die_with(parent)
                while number := os.read(left, _NUMBER):
                    build_launcher(noted[int.from_bytes(number)]())
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


def main(parent: int) -> int:
    """Gets ready, and compiles what is asked for, if anything is."""
    die_with(parent)
    import pagecast_kernels.triton_ops  # noqa: F401  (what all parts need, once)
    import pagecast_worker.torch_executor  # noqa: F401

    line = sys.stdin.readline()
    return 0 if not line or in_parts(json.loads(line)) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
