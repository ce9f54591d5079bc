"""Contract 2, continued: finding requests again, watching the cache, and what an operator may ask of the scheduler.

A request has one key in the core and any number of readers, each with a key of its front end's; the scheduler sends every reader what
the core says under the reader's own key. Questions carry a `ticket` that the asking front end chose; the answer repeats it.
"""

from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

from pagecast_wire.intake import (
    Abort,
    EngineStatus,
    Farewell,
    Finished,
    FrontendBatch,
    FrontendHello,
    FrontendPing,
    FrontendRefused,
    FrontendWelcome,
    HelloWanted,
    Pause,
    Phase,
    PromptLogprobs,
    Ready,
    StopAt,
    Submit,
    TokenLogprobs,
)


class Attach(Struct, frozen=True, forbid_unknown_fields=True, tag="attach"):
    """Read a request that another call, perhaps of another front end, began. Answered by Attached or a Rejected of the same key."""

    key: int
    owner: str
    request_id: str


class Leave(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="leave"):
    """These readers go, but their requests may go on without any reader for `grace_ms`.

    keeps: the front end is to be told of them on under the same keys, until they end, so that it can bring them to a scheduler after
    this one. A second word of such a key ends that.
    """

    keys: tuple[int, ...]
    grace_ms: int
    keeps: bool = False


class Attached(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="attached"):
    """All there is of a request so far; what follows comes in batches, of which the first may repeat some of this.

    submit: as it was sent, with the key of the reader, the time limits that are left and the tokens so far as history. queue_position: when
    it was accepted. elapsed_ms: since then. finished: of the sequences that are over.
    """

    submit: Submit
    queue_position: int
    elapsed_ms: int
    finished: tuple[Finished, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Kept(Struct, frozen=True, forbid_unknown_fields=True, tag="kept"):
    """An ended request that a scheduler before this one kept for late readers, for as long as is left of that."""

    attached: Attached
    left_ms: int

    @property
    def key(self) -> int:
        return self.attached.submit.key


class EarlierLogprobs(Struct, frozen=True, forbid_unknown_fields=True, tag="earlier_logprobs"):
    """Log-probabilities of the tokens in the history that a request was brought back with."""

    key: int
    records: tuple[TokenLogprobs, ...]


MAX_KEPT = 4096
MAX_KEPT_BYTES = 64 << 20
"""Ended requests that the scheduler keeps, and a front end for the scheduler after it; beyond either the oldest are forgotten."""


def kept_bytes(submit: Submit, tokens: tuple[bytes, ...], records: Iterable[TokenLogprobs], of_prompt: Iterable[PromptLogprobs]) -> int:
    """About what keeping a request costs in memory."""
    size = len(submit.prompt) + len(submit.identity.spec) + sum(map(len, tokens))
    size += sum(len(record.top_ids) + len(record.top_logprobs) + 64 for record in records)
    return size + sum(len(part.logprobs) + len(part.top_ids) + len(part.top_logprobs) for part in of_prompt)


class CancelRequests(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="cancel_requests"):
    """End requests by id. every_owner: an operator asks, whoever they belong to; ids empty then means all of them."""

    ticket: int
    request_ids: tuple[str, ...] = ()
    owner: str = ""
    every_owner: bool = False


class CancelReport(Struct, frozen=True, forbid_unknown_fields=True, tag="cancel_report"):
    """Which ids were live and are ended now, which had ended before; the rest are unknown."""

    ticket: int
    cancelled: tuple[str, ...]
    finished: tuple[str, ...]


class WaitCause(IntEnum):
    """Why a request that has no row yet, or again, is not running."""

    NONE = 0  # it runs
    NEXT = 1  # nothing in its way: the next plan takes it
    BEHIND = 2  # others come first; `ahead` of them
    BLOCKS = 3  # it is first, and needs more free blocks than there are
    ROWS = 4  # it is first, and as many sequences run as may
    STEP_FULL = 5  # the steps' token budget goes to prefills that began before it
    BATCH_DELAY = 6  # a first batch gathers
    PAUSED = 7  # its client does not read
    ISOLATION = 8  # requests suspected of crashing workers run alone first
    NO_WORKERS = 9  # no worker group is up
    SIBLING = 10  # the request's first sequence computes the prompt that this one shares
    PACED = 11  # it is in no hurry, and may start later without being the last to end


class RequestReport(Struct, frozen=True, forbid_unknown_fields=True):
    """One open request. Times in milliseconds; deadline_ms -1: none. blocks_needed/blocks_free: to enter, at this moment."""

    request_id: str
    owner: str
    tenant: str
    priority: int
    phase: Phase
    cause: WaitCause
    age_ms: int
    deadline_ms: int
    num_sequences: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks_held: int
    blocks_needed: int
    blocks_free: int
    queue_position: int
    num_preemptions: int
    num_recoveries: int
    num_readers: int
    tenant_served_tokens: int
    least_served_tokens: int  # of the active tenants
    lane: int  # class it waits in, ageing included; below 0: overdue
    labels: tuple[tuple[str, str], ...] = ()


class ListRequests(Struct, frozen=True, forbid_unknown_fields=True, tag="list_requests"):
    """At most `limit` open requests, oldest first, from the first whose order is above `after`."""

    ticket: int
    limit: int
    after: int


class RequestList(Struct, frozen=True, forbid_unknown_fields=True, tag="request_list"):
    """next_after: where the next page begins; -1 if this is the last. total: all open requests."""

    ticket: int
    requests: tuple[RequestReport, ...]
    next_after: int
    total: int


class SetDrain(Struct, frozen=True, forbid_unknown_fields=True, tag="set_drain"):
    """Draining: health says so at once and new requests are refused after announce_ms; running ones go on. Answered by Done."""

    ticket: int
    draining: bool
    announce_ms: int


class ResetPrefixCache(Struct, frozen=True, forbid_unknown_fields=True, tag="reset_prefix_cache"):
    """Forget every cached block. Answered by Done, count = blocks forgotten."""

    ticket: int


class RestartWorkers(Struct, frozen=True, forbid_unknown_fields=True, tag="restart_workers"):
    """End the worker group; running requests wait for the next one. Answered by WorkersEnded."""

    ticket: int


class WorkersEnded(Struct, frozen=True, forbid_unknown_fields=True, tag="workers_ended"):
    """num_ranks: processes that were ended, 0 if no group was up. num_requests: open ones."""

    ticket: int
    num_ranks: int
    num_requests: int


LOG_LEVELS = ("", "debug", "info", "warning", "error")
"""In the order of pagecast.v1.LogLevel; "" is what each process was configured with."""


class SetLogLevel(Struct, frozen=True, forbid_unknown_fields=True, tag="set_log_level"):
    """For every process of the cluster: "debug", "info", "warning", "error", or "" for what each was configured with. Front ends learn it
    from the status, workers by LogLevel. Answered by LogLevelSet."""

    ticket: int
    level: str


class LogLevelSet(Struct, frozen=True, forbid_unknown_fields=True, tag="log_level_set"):
    """previous: what held before."""

    ticket: int
    previous: str


class Done(Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """count: what the question asks to be counted; open requests for SetDrain."""

    ticket: int
    count: int


class Audit(Struct, frozen=True, forbid_unknown_fields=True, tag="audit"):
    """Check every conservation law of the core now."""

    ticket: int


class AuditReport(Struct, frozen=True, forbid_unknown_fields=True, tag="audit_report"):
    """violation: the first law that does not hold; empty if all do. Blocks without the null block."""

    ticket: int
    violation: str
    num_blocks: int
    num_clean: int
    num_cached: int
    num_referenced: int
    num_requests: int
    num_rows: int
    elapsed_us: int


class NotNow(Struct, frozen=True, forbid_unknown_fields=True, tag="not_now"):
    """The question cannot be answered: there is no core yet."""

    ticket: int


class WatchCache(Struct, frozen=True, forbid_unknown_fields=True, tag="watch_cache"):
    """Send cache events under this ticket. after: last sequence number known of that instance (scheduler incarnation); -1: none."""

    ticket: int
    instance: str
    after: int


class UnwatchCache(Struct, frozen=True, forbid_unknown_fields=True, tag="unwatch_cache"):
    """The watcher has gone."""

    ticket: int


class CachedBlock(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A full block that became findable. digest: 32 bytes over its tokens and all before them; parent: the digest before it, or the
    seed of its namespace for a first block. tokens: u32 column."""

    digest: bytes
    parent: bytes
    tokens: bytes


class CacheEvents(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="cache_events"):
    """Changes of the cache, in order: first what was removed, then what was stored. sequence: number of the last change here.

    is_snapshot: the receiver forgets all it knew first. more: the snapshot goes on in the next message. cleared: everything cached
    before is gone (a new epoch, or a reset); what is stored here came after.
    """

    ticket: int
    epoch: int
    sequence: int
    is_snapshot: bool = False
    more: bool = False
    cleared: bool = False
    removed: tuple[bytes, ...] = ()
    stored: tuple[CachedBlock, ...] = ()


Question = CancelRequests | ListRequests | SetDrain | ResetPrefixCache | RestartWorkers | SetLogLevel | Audit | WatchCache | UnwatchCache
Answer = CancelReport | RequestList | Done | WorkersEnded | LogLevelSet | AuditReport | NotNow

Presence = FrontendHello | Ready | FrontendPing | Farewell

FromFrontend = Presence | Submit | Abort | StopAt | Pause | Attach | Leave | Kept | EarlierLogprobs | Question
ToFrontend = FrontendWelcome | FrontendRefused | FrontendBatch | EngineStatus | HelloWanted | Attached | CacheEvents | Answer
