"""What the operator may set for the scheduler process, checked once at the start."""

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZES = (16, 32, 64, 128)
MAX_BATCH_DELAY_MS = 10
MAX_RESUME_S = 3600
MAX_TIME_S = 86_400
MAX_BLOCKS = 1 << 26
"""The block table takes about 16 bytes for each, whether memory for what they hold is there or not."""
MAX_IPC_PATH_BYTES = 107
"""Linux refuses a longer unix socket path (sun_path holds 108 bytes with the closing zero)."""

FRONTENDS_SOCKET = "frontends.ipc"
WORKERS_SOCKET = "workers.ipc"


class ConfigError(ValueError):
    """A setting that cannot work. The text is one line that names the field, the limit and the value."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one scheduler process. Sizes are in blocks, tokens or requests as named; times carry their unit.

    num_blocks caps what the ranks offer; max_model_len caps what the model allows. step_deadline_s is the floor of a step's
    deadline: a longer predicted step gets more. rank_timeout_s is how long a rank may be silent before its absence is fatal.
    fill_steps: heed the sizes of steps that the workers name.
    resume_grace_s: how long the requests of a front end that died go on for somebody to resume them; resume_retention_s: how long the
    output of an ended request is kept for that. head: "host:port" to listen on for ranks of other hosts; wire_keys: folder with
    scheduler.key, without which nothing listens there unless insecure_wire says so.
    record: file that receives every input of the core (record_tokens: with token ids, which are prompts). metrics_port: loopback
    port of the Prometheus text, none by default.
    """

    run_dir: str
    tensor_parallel_size: int = 1
    head: str | None = None
    wire_keys: str | None = None
    insecure_wire: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    batch_delay_ms: float = 0
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_000_000
    max_plans_in_flight: int = 2
    max_steps_per_plan: int = 1
    fill_steps: bool = True
    step_deadline_s: float = 30
    heartbeat_timeout_s: float = 10
    rank_timeout_s: float = 600
    resume_grace_s: float = 30
    resume_retention_s: float = 60
    record: str | None = None
    record_tokens: bool = False
    metrics_port: int | None = None
    check_invariants: bool = False
    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        self._check_numbers()
        self._check_addresses()

    def _check_numbers(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {BLOCK_SIZES}, not {self.block_size}")
        if not 0 <= self.batch_delay_ms <= MAX_BATCH_DELAY_MS:
            raise ConfigError(f"batch_delay_ms must be between 0 and {MAX_BATCH_DELAY_MS}, not {self.batch_delay_ms}")
        for name, most in _MOST.items():
            least = 0 if name == "max_steps_per_plan" else 1
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be at least {least} and at most {most}, not {getattr(self, name)}")
        for name in _TIMES:
            if not 0 < getattr(self, name) <= MAX_TIME_S:
                raise ConfigError(f"{name} must be positive and at most {MAX_TIME_S}, not {getattr(self, name)}")
        for name in ("resume_grace_s", "resume_retention_s"):
            if not 0 <= getattr(self, name) <= MAX_RESUME_S:
                raise ConfigError(f"{name} must be between 0 and {MAX_RESUME_S}, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            value = self.max_num_batched_tokens
            raise ConfigError(f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), not {value}")
        if self.num_blocks is not None and not 2 <= self.num_blocks <= MAX_BLOCKS:
            raise ConfigError(f"num_blocks must be at least 2 (block 0 is never allocated) and at most {MAX_BLOCKS}, not {self.num_blocks}")
        if self.max_model_len is not None and not 2 <= self.max_model_len < 2**31:
            raise ConfigError(f"max_model_len must be at least 2 and below 2**31, not {self.max_model_len}")
        if self.metrics_port is not None and not 0 < self.metrics_port < 65536:
            raise ConfigError(f"metrics_port must be between 1 and 65535, not {self.metrics_port}")

    def _check_addresses(self) -> None:
        if self.head is not None:
            host, _, port = self.head.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError(f"head must be host:port, not {self.head!r}")
            if self.wire_keys is None and not self.insecure_wire:
                words = "pass --wire-keys, or --insecure-wire if nobody else is there"
                raise ConfigError(f"refusing to listen on {self.head} without keys: {words}")
        for socket in (self.frontends_path, self.workers_path):
            size = len(socket.encode())
            if size > MAX_IPC_PATH_BYTES:
                raise ConfigError(f"run_dir is too long: {socket} has {size} bytes, a socket path at most {MAX_IPC_PATH_BYTES}")

    @property
    def frontends_path(self) -> str:
        """File system path of the socket that front ends dial."""
        return f"{self.run_dir}/{FRONTENDS_SOCKET}"

    @property
    def workers_path(self) -> str:
        """File system path of the socket that workers dial."""
        return f"{self.run_dir}/{WORKERS_SOCKET}"


_MOST = {
    "tensor_parallel_size": 1024,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_queued_requests": 2**31 - 1,
    "max_queued_tokens": 2**31 - 1,
    "max_plans_in_flight": 64,
    "max_steps_per_plan": 1024,
}
_TIMES = ("step_deadline_s", "heartbeat_timeout_s", "rank_timeout_s")
