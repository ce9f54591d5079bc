"""What a worker's options and its model's configuration say of a start, before anything else of the model is read.

Loads no torch: `pagecast serve` asks before it starts a process, and a worker before it has imported what takes seconds.
"""

import os
from pathlib import Path
from typing import Literal

from pagecast_worker.config import ConfigError, WorkerConfig
from pagecast_worker.executor import LoadError
from pagecast_worker.loading.hf_config import read_config
from pagecast_worker.loading.schemes import Scheme
from pagecast_worker.models.config import ModelConfig

Device = Literal["cpu", "cuda"]

MIN_BLOCKS = 2
"""The null block and one to work with."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Without any of them a machine has no GPU that torch could use; with one it may."""
_LEAST_BYTES = {"float32": 4}
"""Of a K or V element; the other types, and what auto may mean, take two."""


def check(config: WorkerConfig, *, here: bool = True) -> str | None:
    """One line of what will be less than the options or the model say, or None. here: the worker runs on this machine.

    Raises ConfigError for what cannot work, naming the option or the file and its field."""
    if config.executor == "oracle":
        return None
    device = _device_of(config.device, here)
    try:
        shape, scheme = described(config)
        check_model(config, shape, scheme, device if here else None, _LEAST_BYTES.get(config.dtype, 2))
        return _shortened(config, shape, device if here else None)
    except LoadError as error:
        raise ConfigError(str(error)) from None
    except ModuleNotFoundError:
        return None  # the worker says what is to be installed


def described(config: WorkerConfig) -> tuple[ModelConfig, Scheme | None]:
    """The configuration of the model, and how its weights are quantized; of a .gguf file without its vocabulary. Raises LoadError."""
    path = Path(config.random_weights or config.model)
    if path.suffix != ".gguf" or path.is_dir():
        return read_config(path)
    from pagecast_worker.loading.gguf_config import Metadata  # brings NumPy with it

    # What only its tensors tell is left out: nothing here asks for it.
    return Metadata.of(path).configuration(vocab_size=1, tied=True, rope_factors=(), quantization=""), None


def check_model(config: WorkerConfig, shape: ModelConfig, scheme: Scheme | None, device: Device | None, itemsize: int) -> None:
    """Raises LoadError for options that this model, or a device of this kind (None: not known yet), cannot be served with.

    itemsize: bytes of an element of activations, at least."""
    max_model_len(config, shape)
    if config.quantization is not None and scheme is not None:
        raise LoadError(
            f"quantization must not be given for a checkpoint that is quantized ({scheme.name}), got {config.quantization}"
        )
    if config.kv_cache_dtype == "fp8" and shape.latent is not None:
        raise LoadError("kv_cache_dtype must be auto for a model with latent attention, got fp8")
    is_quantized = config.quantization is not None or scheme is not None
    if device == "cuda" and is_quantized and itemsize == 4:
        raise LoadError("dtype must be bfloat16 or float16 for quantized weights on a GPU, got float32")
    if config.batch_invariant and device == "cpu":
        raise LoadError("batch_invariant needs a GPU, this worker runs on a CPU")
    if config.batch_invariant and (is_quantized or shape.experts is not None or shape.latent is not None):
        raise LoadError("batch_invariant takes models with 16-bit weights, without experts and without latent attention")
    if device == "cpu":
        granted_blocks(config, _bytes_of_block(config, shape, itemsize))


def max_model_len(config: WorkerConfig, shape: ModelConfig) -> int:
    """The longest sequence in tokens. Raises LoadError where more is asked than the model knows positions for."""
    if config.max_model_len is not None and config.max_model_len > shape.max_position:
        raise LoadError(f"max_model_len must be at most {shape.max_position} for this model, got {config.max_model_len}")
    return config.max_model_len or shape.max_position


def granted_blocks(config: WorkerConfig, bytes_per_block: int) -> int:
    """Blocks on a CPU. Raises LoadError for fewer than can be worked with, and for more than the machine has memory."""
    count = config.num_blocks
    if count is None:
        count = int(config.cpu_kv_gib * (1 << 30)) // bytes_per_block
        if count < MIN_BLOCKS:
            least = 1.006 * MIN_BLOCKS * bytes_per_block / (1 << 30)  # its three digits are not less than it is
            raise LoadError(f"cpu_kv_gib must be at least {least:.3g}, got {config.cpu_kv_gib:g}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if count * bytes_per_block > memory:
        need = count * bytes_per_block / (1 << 30)
        raise LoadError(f"{_pool_option(config)} takes {need:.1f} GiB, and this machine has {memory / (1 << 30):.1f}")
    return count


def _pool_option(config: WorkerConfig) -> str:
    """The option that sizes the pool, and its value."""
    return f"cpu_kv_gib {config.cpu_kv_gib:g}" if config.num_blocks is None else f"num_blocks {config.num_blocks}"


def _device_of(name: str, here: bool) -> Device | None:
    """The kind of device that is meant, as far as that is known without asking the driver."""
    kind = name.partition(":")[0]
    if kind == "auto":
        return None if not here or any(Path(file).exists() for file in _GPU_FILES) else "cpu"
    return "cuda" if kind == "cuda" else "cpu"


def _bytes_of_block(config: WorkerConfig, shape: ModelConfig, itemsize: int) -> int:
    return shape.block_bytes(config.block_size, 1 if config.kv_cache_dtype == "fp8" else itemsize, config.tensor_parallel_size)


def _shortened(config: WorkerConfig, shape: ModelConfig, device: Device | None) -> str | None:
    """Where the pool is certainly too small for the longest sequence: the scheduler will lower what a request may take."""
    if config.num_blocks is None and device != "cpu":
        return None
    blocks = config.num_blocks or granted_blocks(config, _bytes_of_block(config, shape, _LEAST_BYTES.get(config.dtype, 2)))
    held, wanted = (blocks - 1) * config.block_size, max_model_len(config, shape)
    if held >= wanted:
        return None
    of = "the model's" if config.max_model_len is None else "max_model_len"
    return f"{_pool_option(config)} holds sequences of at most {held} tokens; {of} {wanted} is lowered to what fits"
