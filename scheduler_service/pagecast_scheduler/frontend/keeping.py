"""Ended requests that this process has seen, kept as long as the scheduler keeps them: a scheduler after this one gets them back."""

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pagecast_scheduler.frontend.streams import RequestStream
from pagecast_wire.control import MAX_KEPT, MAX_KEPT_BYTES, Attached, Kept, kept_bytes
from pagecast_wire.intake import Submit


class Keeping:
    """By name, oldest first, within the scheduler's own bounds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: OrderedDict[tuple[str, str], tuple[Attached, float, float]] = OrderedDict()  # what, when it ended, until when
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, stream: RequestStream, retention_s: float) -> None:
        """Keeps a request if it is over, and of a kind that late readers can name. Its earlier namesake is forgotten."""
        submit = stream.request.submit
        if not (stream.is_over and isinstance(submit, Submit) and submit.identity.keep and submit.identity.request_id and retention_s):
            return
        now = self._clock()
        name = submit.identity.owner, submit.identity.request_id
        self._forget(name)
        attached = stream.as_ended(now)
        self._ended[name] = attached, now, now + retention_s
        self._num_bytes += _size(attached)
        self._expire(now)

    def messages(self, new_key: Callable[[], int]) -> list[Kept]:
        """What brings them back, each under a key of this process's own."""
        now = self._clock()
        self._expire(now)
        return [_kept(attached, new_key(), now - ended, until - now) for attached, ended, until in self._ended.values()]

    def _expire(self, now: float) -> None:
        while self._ended:
            name, (_, _, until) = next(iter(self._ended.items()))
            if until > now and len(self._ended) <= MAX_KEPT and self._num_bytes <= MAX_KEPT_BYTES:
                return
            self._forget(name)

    def _forget(self, name: tuple[str, str]) -> None:
        found = self._ended.pop(name, None)
        if found is not None:
            self._num_bytes -= _size(found[0])


def _size(attached: Attached) -> int:
    return kept_bytes(attached.submit, attached.submit.history, attached.logprobs, attached.prompt_logprobs)


def _kept(attached: Attached, key: int, age_s: float, left_s: float) -> Kept:
    submit = msgspec.structs.replace(attached.submit, key=key)
    elapsed_ms = attached.elapsed_ms + int(age_s * 1000)
    return Kept(msgspec.structs.replace(attached, submit=submit, elapsed_ms=elapsed_ms), max(1, int(left_s * 1000)))
