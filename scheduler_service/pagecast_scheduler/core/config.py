"""What a scheduler is told once, at its start. All times are integer microseconds, all sizes tokens or blocks."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy numbers. Raises ValueError naming the field whose value cannot work.

    num_blocks includes the null block, so `num_blocks - 1` blocks of `block_size` tokens hold KV.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int = 2048
    max_queued_tokens: int = 4_000_000
    enable_prefix_caching: bool = True
    batch_delay_us: int = 0
    arrival_gap_us: int = 0  # requests of class BATCH that follow each other faster are of one list and begin together; see gathering
    max_plans_in_flight: int = 2
    max_steps_per_plan: int = 1  # 0: as many as take 8 ms, see policy.automatic_steps
    table_checksums: bool = False
    ageing_us: int = 10_000_000  # waiting so long raises a request by one priority class
    max_head_passes: int = 16  # admissions that may pass a blocked head of the queue
    max_pass_candidates: int = 4  # blocked requests looked at in one step before giving up
    max_recoveries: int = 16  # worker groups that one request may outlive
    progress_interval_us: int = 1_000_000  # how often waiting requests learn their position
    estimate_percent: int = 50  # part of an estimate that must already exceed a limit before a request is refused for it
    max_tenants: int = 4096  # fairness counters kept for tenants with nothing in the system
    step_sizes: tuple[int, ...] = ()  # tokens, ascending, that a step with prefill had better have while others wait; see fitting

    def __post_init__(self) -> None:
        at_least = {
            "block_size": 1, "num_blocks": 2, "max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": self.max_num_seqs,
            "max_queued_requests": 1, "max_queued_tokens": 1, "batch_delay_us": 0, "arrival_gap_us": 0, "max_plans_in_flight": 1,
            "max_steps_per_plan": 0, "ageing_us": 1, "max_head_passes": 0, "max_pass_candidates": 1, "max_recoveries": 0,
            "progress_interval_us": 1, "estimate_percent": 1, "max_tenants": 1,
        }  # fmt: skip
        for field, low in at_least.items():
            if getattr(self, field) < low:
                raise ValueError(f"{field} is {getattr(self, field)}, must be at least {low}")
        if any(small >= large for small, large in pairwise((0, *self.step_sizes))):
            raise ValueError(f"step_sizes are {self.step_sizes}, must be positive and ascending")

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV the whole pool can hold."""
        return (self.num_blocks - 1) * self.block_size
