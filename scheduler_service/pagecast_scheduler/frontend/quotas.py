"""Quotas of principals: streams, queued requests, tokens a minute. Counted in this process; asked once per request, nothing per token.

Tokens are a bucket that holds one minute's worth and fills evenly. A request takes its prompt and the most it may put out when it is
admitted, and gives back at its end what it did not put out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.principals import Principal

SOON_MS = 1000
"""Retry advice where only another request's end helps."""


class Queued(Protocol):
    """What a quota asks of an open request."""

    @property
    def is_queued(self) -> bool: ...


@dataclass(slots=True)
class _Account:
    """One principal's present use. tokens: what is left of the minute, as of `filled` (monotonic seconds)."""

    streams: set["Lease"] = field(default_factory=set)
    tokens: float | None = None
    filled: float = 0.0

    def num_queued(self) -> int:
        return sum(lease.request is not None and lease.request.is_queued for lease in self.streams)


@dataclass(eq=False, slots=True)
class Lease:
    """What one request holds of its principal's quota, from `Quotas.admit` to `end`. request: None once its caller has gone."""

    account: _Account
    request: Queued | None
    reserved: int
    capacity: int | None
    is_settled: bool = False

    def leave(self) -> None:
        """The caller goes, the request goes on: one stream less, while its tokens stay reserved until `end`."""
        self.account.streams.discard(self)
        self.request = None  # which knows the lease: such a pair would stay, prompt, output and all, until the collector comes by

    def end(self, used: int) -> None:
        """The request is over and has used so many tokens of those reserved; harmless a second time."""
        self.leave()
        if not self.is_settled and self.account.tokens is not None and self.capacity is not None:
            self.account.tokens = min(self.capacity, self.account.tokens + max(0, self.reserved - used))
        self.is_settled = True


class Quotas:
    """The accounts of all principals that have called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._accounts: dict[str, _Account] = {}
        self._clock = clock

    def admit(self, principal: Principal, request: Queued, prompt_tokens: int, max_output_tokens: int) -> Lease:
        """Takes the request into account. Raises Refusal with RESOURCE_EXHAUSTED, naming the quota, and when to come back."""
        account = self._accounts.setdefault(principal.name, _Account())
        quota = principal.quota
        if quota.streams is not None and len(account.streams) >= quota.streams:
            raise _refusal(Reason.QUOTA_REQUESTS, principal, f"{quota.streams} requests at a time", SOON_MS)
        if quota.queued_requests is not None and account.num_queued() >= quota.queued_requests:
            raise _refusal(Reason.QUOTA_REQUESTS, principal, f"{quota.queued_requests} queued requests", SOON_MS)
        wanted = prompt_tokens + max_output_tokens
        if quota.tokens_per_minute is not None:
            self._take(account, principal, wanted, quota.tokens_per_minute)
        lease = Lease(account, request, wanted, quota.tokens_per_minute)
        account.streams.add(lease)
        return lease

    def _take(self, account: _Account, principal: Principal, wanted: int, capacity: int) -> None:
        now = self._clock()
        if account.tokens is None:
            account.tokens = float(capacity)
        else:
            account.tokens = min(float(capacity), account.tokens + (now - account.filled) * capacity / 60)
        account.filled = now
        if wanted > capacity:
            text = f"{capacity} tokens a minute; this request alone may need {wanted}: lower max_output_tokens"
            raise _refusal(Reason.QUOTA_TOKENS, principal, text, 60_000)
        if wanted > account.tokens:
            wait_ms = int((wanted - account.tokens) * 60_000 / capacity) + 1
            raise _refusal(Reason.QUOTA_TOKENS, principal, f"{capacity} tokens a minute", wait_ms)
        account.tokens -= wanted


def _refusal(reason: Reason, principal: Principal, limit: str, wait_ms: int) -> Refusal:
    return Refusal(
        reason, message=f"the caller's quota is {limit}", retry_after_ms=wait_ms, quota=(f"principal:{principal.name}", limit)
    )
