"""Checks DeliveryOptions: how a caller wants the events of one stream."""

from typing import Any

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.limits import Limits
from pagecast_scheduler.frontend.streams import CREDIT_TOKENS, Delivery

PROGRESS_S = 15.0
"""Silence before a progress event where the caller names none; proxies cut quiet streams after minutes."""
MAX_FLUSH_S = 1.0


class _Durations:
    """Reads Duration fields in seconds and gathers what is wrong with them."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.found: list[Violation] = []

    def seconds(self, field: str, low: float, high: float, default: float) -> float:
        """The field's value; the default where it is absent or out of range."""
        if not self._message.HasField(field):
            return default
        value = getattr(self._message, field)
        seconds: float = value.seconds + value.nanos / 1e9
        if not low <= seconds <= high:
            self.found.append(Violation(f"delivery.{field}", f"must be {low:g} s to {high:g} s, not {seconds:g} s"))
            return default
        return seconds


def check_delivery(message: Any, limits: Limits, max_detach_grace_s: float) -> Delivery:
    """Effective delivery of a stream. Raises Refusal with every violation found."""
    durations = _Durations(message)
    progress = durations.seconds("progress_interval", limits.min_progress_s, limits.max_progress_s, PROGRESS_S)
    flush = durations.seconds("flush_interval", 0.0, MAX_FLUSH_S, 0.0)
    grace = durations.seconds("detach_grace", 0.0, max_detach_grace_s, max_detach_grace_s)
    found = durations.found
    if message.HasField("max_tokens_per_event") and not message.max_tokens_per_event:
        found.append(Violation("delivery.max_tokens_per_event", "must be at least 1, not 0"))
    credit = message.credit_tokens if message.HasField("credit_tokens") else CREDIT_TOKENS
    if not 1 <= credit <= limits.max_credit_tokens:
        found.append(Violation("delivery.credit_tokens", f"must be 1 to {limits.max_credit_tokens}, not {credit}"))
    detaches = message.on_disconnect == pb.ON_DISCONNECT_DETACH
    if message.HasField("detach_grace") and not detaches:
        found.append(Violation("delivery.detach_grace", "is only for on_disconnect DETACH"))
    if found:
        raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(found))
    return Delivery(
        progress_interval_s=progress, flush_interval_s=flush, max_tokens=message.max_tokens_per_event,
        detach_grace_s=grace if detaches else 0.0, pauses=message.slow_consumer != pb.SLOW_CONSUMER_ABORT,
        credit_tokens=credit,
    )  # fmt: skip
