"""From a front end's message to a call of the core, and back: what is refused before the core sees it, and where answers go."""

from collections import deque
from typing import Any

import msgspec

from pagecast_scheduler.engine.epochs import Epochs, Record
from pagecast_scheduler.engine.frontends import Frontend, Frontends
from pagecast_scheduler.engine.logs import logger
from pagecast_wire.codec import WireError
from pagecast_wire.intake import KEY_BITS, Abort, Accepted, FrontendBatch, Pause, Rejected, RejectReason, StopAt, Submit

RETRY_AFTER_MS = 1000
"""Hint to the caller of a request that was refused because of the engine's state."""


class Intake:
    """Owns the answers to submits that have not been sent yet, and the messages that wait until a lost scheduler's requests are back."""

    def __init__(self, frontends: Frontends, epochs: Epochs, record: Record | None) -> None:
        self._log = logger("intake")
        self._frontends = frontends
        self._epochs = epochs
        self._record = record
        self._answers: dict[int, tuple[list[Accepted], list[Rejected]]] = {}
        self._deferred: deque[tuple[Frontend, Any]] = deque()
        self.is_draining = False
        self.is_holding = False
        self.num_malformed = 0

    def take(self, frontend: Frontend, message: Any, now: int) -> None:
        """One request message of a welcomed front end. Held back, in order, while others bring back what was running before."""
        if self.is_holding and not frontend.is_resubmitting:
            self._deferred.append((frontend, message))
        else:
            self._apply(frontend, message, now)

    def release(self, now: int) -> None:
        """The hold is over: take what was held back."""
        self.is_holding = False
        while self._deferred:
            frontend, message = self._deferred.popleft()
            self._apply(frontend, message, now)

    def _apply(self, frontend: Frontend, message: Any, now: int) -> None:
        core = self._epochs.core
        assert core is not None
        if isinstance(message, Submit):
            self._answer(frontend.slot, self._submit(frontend.slot, message, now))
            return
        keys = message.keys if isinstance(message, Abort) else (message.key,)
        if any(key >> KEY_BITS != frontend.slot for key in keys):
            self.num_malformed += 1
            return
        if self._record is not None:
            self._record.arrival(now, message)
        match message:
            case Abort():
                for key in message.keys:
                    core.abort(key, now)
            case StopAt():
                core.stop_at(message.key, message.sequence, message.keep, now)
            case Pause():
                core.pause(message.key, message.paused, now)

    def _submit(self, slot: int, submit: Submit, now: int) -> Accepted | Rejected:
        core = self._epochs.core
        assert core is not None
        if submit.key >> KEY_BITS != slot:
            self.num_malformed += 1
            return Rejected(submit.key, RejectReason.INVALID, field="key")
        if self.is_draining:
            return Rejected(submit.key, RejectReason.DRAINING, retry_after_ms=RETRY_AFTER_MS)
        if self._epochs.is_braking(now):
            return Rejected(submit.key, RejectReason.RECOVERING, retry_after_ms=RETRY_AFTER_MS)
        if self._record is not None:
            self._record.arrival(now, submit)
        try:
            return core.submit(submit, now)
        except (WireError, ValueError) as error:
            self.num_malformed += 1
            self._log.warning("malformed submit", key=submit.key, error=type(error).__name__)
            return Rejected(submit.key, RejectReason.INVALID, field="submit")

    def _answer(self, slot: int, answer: Accepted | Rejected) -> None:
        accepted, rejected = self._answers.setdefault(slot, ([], []))
        if isinstance(answer, Accepted):
            accepted.append(answer)
        else:
            rejected.append(answer)
            reason = answer.reason.name
            self._log.info("request rejected", key=answer.key, reason=reason, field=answer.field, limit=answer.limit, actual=answer.actual)

    def drop(self, slot: int, now: int) -> None:
        """A front end has vanished: its requests end, its unsent answers with them."""
        self._answers.pop(slot, None)
        self._deferred = deque((f, m) for f, m in self._deferred if f.slot != slot)
        core = self._epochs.core
        if core is not None:
            if self._record is not None:
                self._record.control(now, "drop_frontend", {"slot": slot})
            core.drop_frontend(slot, now)

    def take_batches(self) -> list[tuple[int, FrontendBatch]]:
        """One batch per front end that has something to learn: answers to its submits first, then what the core has for it."""
        core = self._epochs.core
        batches = core.take_batches() if core is not None else []
        if not self._answers:
            return batches
        merged = dict(batches)
        for slot, (accepted, rejected) in self._answers.items():
            batch = merged.get(slot) or FrontendBatch(step=self._epochs.step)
            merged[slot] = msgspec.structs.replace(batch, accepted=(*batch.accepted, *accepted), rejected=(*batch.rejected, *rejected))
        self._answers.clear()
        return list(merged.items())
