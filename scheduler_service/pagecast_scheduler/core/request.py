"""Cold data of requests and sequences: what the scheduler knows of them outside the arrays of running rows.

A request owns one or more sequences (num_sequences). A sequence is WAITING, RUNNING or FINISHED; what a client sees of it
(queued, prefilling, decoding, paused, recovering) is derived when it changes and never stored.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.prefix_cache import HashChain
from pagecast_wire.intake import KEY_BITS, Finished, Priority, Submit
from pagecast_wire.sampling import SamplingParams

NEVER = 1 << 62
"""A time that does not come."""

PATIENT_US = 600_000_000
"""While a limit is so far away, such as a server's own on any request, it puts nobody of class BATCH in a hurry."""

TOKEN_US = 10_000
"""What an output token is taken to need, where outputs are only compared with each other."""


class Status(IntEnum):
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request. Times are absolute microseconds; NEVER where there is no limit."""

    key: int
    slot: int  # front end that named the key
    submit: Submit
    num_prompt_tokens: int
    max_tokens: int  # prompt and output together
    min_tokens: int
    arrival: int
    order: int  # unique, grows with arrival: ties are broken by it
    tenant: int  # index into the tenant counters
    deadline: int
    budget_end: int
    queue_end: int
    sequences: list["Sequence"] = field(default_factory=list)
    held: list["Sequence"] = field(default_factory=list)  # siblings that wait until the first one has planned the whole prompt
    num_open: int = 0
    paused: bool = False
    preparing: bool = False  # its constraint is not compiled yet: no sequence may enter the queue
    started: bool = False  # any sequence was ever admitted, here or before a scheduler was lost
    num_crashes: int = 0  # worker groups lost in a row while this request was in a step in flight
    prompt_told: int = 1  # position of the first prompt token whose log-probabilities were not told, if they were asked for
    crash_tokens: int = 0  # once any sequence holds more tokens than this, a suspect is cleared

    @property
    def sampling(self) -> SamplingParams:
        return self.submit.sampling

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.submit.sampling.num_prompt_logprobs >= 0 and self.prompt_told < self.num_prompt_tokens

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def is_patient(self) -> bool:
        """Whether all that counts is when the last of many such requests ends: class BATCH, and no limit on its time that is near."""
        return self.submit.priority == Priority.BATCH and self.first_limit - self.arrival >= PATIENT_US

    @property
    def first_limit(self) -> int:
        """The first time at which the request ends whatever it has. NEVER: none."""
        return min(self.deadline, self.budget_end, self.queue_end)

    def is_hurried(self, now: int) -> bool:
        """Whether it is not to wait longer than it must: impatient from the start, or its limit has come near."""
        return not self.is_patient or self.first_limit - now < PATIENT_US

    @property
    def due(self) -> int:
        """What its class is ordered by: its deadline, in class BATCH less what its output takes, so that the longest begin first."""
        if self.submit.priority != Priority.BATCH:
            return self.deadline
        return self.deadline - (self.max_tokens - self.num_prompt_tokens) * TOKEN_US

    @property
    def patient_order(self) -> int:
        """What the patient are ordered by once they are overdue: the longest output first, but none that came long after goes before."""
        return self.arrival - (self.max_tokens - self.num_prompt_tokens) * TOKEN_US


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request.

    tokens: u32, prompt and applied output; exact while the sequence has no row, else the row's tokens count. num_tokens of them are
    valid (the array may be longer after a detach).
    """

    request: Request
    index: int
    tokens: NDArray[np.uint32]
    num_tokens: int
    chain: HashChain
    status: Status = Status.WAITING
    row: int = -1
    detached: tuple[int, int] | None = None  # (row, generation) it had, while its last results are in flight
    resumed: bool = False  # preempted or recovered: goes to the head of its class
    queued: bool = False
    ticket: int = 0  # number of its valid queue entry
    lane: int = 0  # class it waits in now, ageing included
    blocked: tuple[int, int] = (0, -1)  # (free blocks it lacked, PrefixCache.num_changes) when last looked at
    passes: int = 0  # admissions that went past it while it was the blocked head
    admitted_at: int = -1
    first_token_at: int = -1
    num_cached_tokens: int = 0  # prefix hits of the first admission
    hit_tokens: int = 0  # prefix hits of the current admission
    num_computed_before: int = 0  # most tokens whose KV it ever had: computing them once more is recomputing
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_recoveries: int = 0
    end: Finished | None = None  # what its front end was told

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens


def slot_of(key: int) -> int:
    """Front end that owns a key."""
    return key >> KEY_BITS
