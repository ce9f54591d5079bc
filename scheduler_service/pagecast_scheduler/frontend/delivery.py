"""How a caller wants the events of one stream, and the check of DeliveryOptions, which say it."""

from dataclasses import dataclass
from typing import Any

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.limits import Limits

PROGRESS_S = 15.0
"""Silence before a progress event where the caller names none; proxies cut quiet streams after minutes."""
MAX_FLUSH_S = 1.0
CREDIT_TOKENS = 1024
"""Undelivered tokens of a stream above which its request is paused, unless the caller says otherwise; it goes on when all of them are
delivered."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one call wants its output. Times in seconds. max_tokens: of one event, 0 for no limit. detach_grace_s: how long the request
    goes on without a reader, 0 to end with the call. pauses: whether an unread request is paused, not ended. credit_tokens: how many
    tokens may be unread before."""

    progress_interval_s: float = float("inf")
    flush_interval_s: float = 0.0
    max_tokens: int = 0
    detach_grace_s: float = 0.0
    pauses: bool = True
    credit_tokens: int = CREDIT_TOKENS


DEFAULT_DELIVERY = Delivery()
"""Of a call that says nothing about it."""


def check_delivery(message: Any, limits: Limits, max_detach_grace_s: float) -> Delivery:
    """Effective delivery of a stream. Raises Refusal with every violation found."""
    found = Findings()
    progress = found.seconds("delivery.progress_interval", message, limits.min_progress_s, limits.max_progress_s, PROGRESS_S)
    flush = found.seconds("delivery.flush_interval", message, 0.0, MAX_FLUSH_S, 0.0)
    grace = found.seconds("delivery.detach_grace", message, 0.0, max_detach_grace_s, max_detach_grace_s)
    if message.HasField("max_tokens_per_event") and not message.max_tokens_per_event:
        found.add("delivery.max_tokens_per_event", "must be at least 1, not 0")
    credit = message.credit_tokens if message.HasField("credit_tokens") else CREDIT_TOKENS
    found.integer("delivery.credit_tokens", credit, 1, limits.max_credit_tokens)
    detaches = message.on_disconnect == pb.ON_DISCONNECT_DETACH
    if message.HasField("detach_grace") and not detaches:
        found.add("delivery.detach_grace", "is only for on_disconnect DETACH")
    found.refuse()
    return Delivery(
        progress_interval_s=progress, flush_interval_s=flush, max_tokens=message.max_tokens_per_event,
        detach_grace_s=grace if detaches else 0.0, pauses=message.slow_consumer != pb.SLOW_CONSUMER_ABORT,
        credit_tokens=credit,
    )  # fmt: skip
