"""What one worker process is told when it starts. Values only: everything that can be measured is measured after loading."""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

ExecutorName = Literal["torch", "oracle"]
LogFormat = Literal["auto", "json", "console"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|(?:cpu|cuda)(?::\d+)?")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


class ConfigError(ValueError):
    """A worker option that cannot work. The text is one line for the operator and names the option, its limit and its value."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Options of one rank. Every rank of a group gets the same values but for `rank`.

    run_dir: folder (mode 0700) that holds the cluster's sockets. head: "host:port" of a scheduler elsewhere; wire_keys: folder
    with rank.key, without which no other host is dialled unless insecure_wire says so. model: absolute path of a model folder or
    .gguf file; the oracle takes it as a name only. num_blocks: KV pool size in blocks, null block included; None measures
    memory. cpu_kv_gib: KV pool size on the CPU backend in GiB. random_weights: a folder with a config.json; weights
    are then made up. quantization: "fp8" or "int4", to which weights are rounded while they are loaded. kv_cache_dtype: "auto" or
    "fp8". fold_norms: on a GPU, and where a model allows it, norms have no launch of their own. oracle_step_us: microseconds that the
    oracle takes for a step. dtype "auto": bfloat16 on a GPU, the faster one on a CPU.
    """

    run_dir: str
    model: str
    rank: int = 0
    tensor_parallel_size: int = 1
    executor: ExecutorName = "torch"
    device: str = "auto"
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_gib: float = 1.0
    max_num_seqs: int = 256
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    enforce_eager: bool = False
    batch_invariant: bool = False
    fold_norms: bool = True
    random_weights: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    oracle_vocab_size: int = 49152
    oracle_step_us: int = 0
    head: str | None = None
    wire_keys: str | None = None
    insecure_wire: bool = False
    log_format: LogFormat = "auto"
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Raises ConfigError for the first option that is out of its range."""
        size = self.tensor_parallel_size
        for ok, message in (
            (size >= 1, f"tensor_parallel_size must be at least 1, got {size}"),
            (0 <= self.rank < size, f"rank must be below tensor_parallel_size {size}, got {self.rank}"),
            (self.head is None or _is_address(self.head), f"head must be host:port, got {self.head!r}"),
            (
                self.head is None or self.wire_keys is not None or self.insecure_wire,
                f"refusing to dial {self.head} without keys: pass --wire-keys, or --insecure-wire if nobody else is there",
            ),
            (self.executor in ("torch", "oracle"), f"executor must be torch or oracle, got {self.executor!r}"),
            (_DEVICE.fullmatch(self.device), f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}"),
            (self.dtype in DTYPES, f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {self.dtype!r}"),
            (self.block_size in (16, 32, 64, 128), f"block_size must be 16, 32, 64 or 128, got {self.block_size}"),
            (self.num_blocks is None or self.num_blocks >= 2, f"num_blocks must be at least 2, got {self.num_blocks}"),
            (0.0 < self.gpu_memory_utilization <= 1.0, f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"),
            (0.0 < self.cpu_kv_gib <= 1 << 20, f"cpu_kv_gib must be above 0 and at most {1 << 20}, got {self.cpu_kv_gib}"),
            (self.max_num_seqs >= 1, f"max_num_seqs must be at least 1, got {self.max_num_seqs}"),
            (self.max_model_len is None or self.max_model_len >= 2, f"max_model_len must be at least 2, got {self.max_model_len}"),
            (self.max_num_batched_tokens >= 1, f"max_num_batched_tokens must be at least 1, got {self.max_num_batched_tokens}"),
            (self.quantization in (None, "fp8", "int4"), f"quantization must be fp8 or int4, got {self.quantization!r}"),
            (self.kv_cache_dtype in ("auto", "fp8"), f"kv_cache_dtype must be auto or fp8, got {self.kv_cache_dtype!r}"),
            (
                not self.batch_invariant or (size == 1 and self.quantization is None and self.kv_cache_dtype == "auto"),
                "batch_invariant takes one rank, and neither quantization nor kv_cache_dtype",
            ),
            (2 <= self.oracle_vocab_size <= 1 << 24, f"oracle_vocab_size must be 2 to {1 << 24}, got {self.oracle_vocab_size}"),
            (0 <= self.oracle_step_us <= 10**9, f"oracle_step_us must be 0 to {10**9}, got {self.oracle_step_us}"),
        ):
            if not ok:
                raise ConfigError(message)

    @property
    def workers_endpoint(self) -> str:
        """ZeroMQ endpoint that the scheduler binds for workers."""
        return f"tcp://{self.head}" if self.head is not None else f"ipc://{self.run_dir}/workers.ipc"

    def digest(self) -> str:
        """Hex digest over what ranks of one group must agree on; compared by the scheduler in the hellos."""
        shared = (
            self.model, self.tensor_parallel_size, self.executor, self.dtype, self.block_size, self.max_num_seqs, self.max_model_len,
            self.max_num_batched_tokens, self.random_weights, self.quantization, self.kv_cache_dtype,
            self.oracle_vocab_size, self.enforce_eager, self.batch_invariant, self.num_blocks is None,
        )
        return hashlib.sha256(repr(shared).encode()).hexdigest()[:16]
