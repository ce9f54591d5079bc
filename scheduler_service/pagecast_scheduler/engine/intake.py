"""From a front end's message to a call of the core, and back: what is refused before the core sees it, and where answers go."""

from collections import deque
from typing import Any

import msgspec

from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.engine.directory import Directory, Entry
from pagecast_scheduler.engine.epochs import Epochs, Record
from pagecast_scheduler.engine.frontends import Frontend, Frontends
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.returning import in_order_of_return
from pagecast_wire.codec import WireError
from pagecast_wire.control import Attach, EarlierLogprobs, Kept, Leave
from pagecast_wire.intake import KEY_BITS, Abort, Accepted, FrontendBatch, Pause, Rejected, RejectReason, StopAt, Submit
from pagecast_wire.sampling import FinishReason

RETRY_AFTER_MS = 1000
"""Hint to the caller of a request that was refused because of the engine's state."""


class Intake:
    """Owns the answers to submits that have not been sent yet, and the messages that wait until a lost scheduler's requests are back."""

    def __init__(self, frontends: Frontends, epochs: Epochs, directory: Directory, record: Record | None) -> None:
        self._log = logger("intake")
        self._frontends = frontends
        self._epochs = epochs
        self._directory = directory
        self._record = record
        self._answers: dict[int, tuple[list[Accepted], list[Rejected]]] = {}
        self._deferred: deque[tuple[Frontend, Any]] = deque()
        self._returned: list[tuple[Frontend, Any]] = []
        self.is_draining = False
        self.is_holding = False
        self.refuse_from: int | None = None  # an operator drains: new requests are refused from this time on
        self.num_malformed = 0

    @property
    def _core(self) -> Scheduler:
        core = self._epochs.core
        assert core is not None
        return core

    def take(self, frontend: Frontend, message: Any, now: int) -> None:
        """One request message of a welcomed front end. Held back while front ends bring back what was running before."""
        if not self.is_holding:
            self._apply(frontend, message, now)
        elif frontend.is_resubmitting:
            self._returned.append((frontend, message))
        else:
            self._deferred.append((frontend, message))

    def release(self, now: int) -> None:
        """The hold is over: take what was brought back, then what was held back, in order."""
        self.is_holding = False
        for frontend, message in in_order_of_return(self._returned):
            self._apply(frontend, message, now)
        self._returned.clear()
        while self._deferred:
            frontend, message = self._deferred.popleft()
            self._apply(frontend, message, now)

    def _apply(self, frontend: Frontend, message: Any, now: int) -> None:
        keys = message.keys if isinstance(message, Abort | Leave) else (message.key,)
        if any(key >> KEY_BITS != frontend.slot for key in keys):
            self.num_malformed += 1
            if isinstance(message, Submit | Attach):
                self._answer(frontend.slot, Rejected(message.key, RejectReason.INVALID, field="key"))
            return
        match message:
            case Submit():
                self._submit(frontend.slot, message, now)
            case Attach():
                self._attach(frontend.slot, message, now)
            case Abort():
                self._leave(keys, 0, now)
            case Leave():
                self._leave(keys, message.grace_ms * 1000, now, message.keeps)
            case Kept():
                self._directory.restore(message, now)
            case EarlierLogprobs():
                self._directory.restore_logprobs(message)
            case StopAt():
                own = msgspec.structs.replace(message, key=self._directory.core_key(message.key))
                self._arrival(own, now)
                self._core.stop_at(own.key, own.sequence, own.keep, now)
            case Pause():
                self._pause(*self._directory.pause(message.key, message.paused), now)

    def _arrival(self, message: Any, now: int) -> None:
        if self._record is not None:
            self._record.arrival(now, message)

    def _leave(self, keys: tuple[int, ...], grace_us: int, now: int, keeps: bool = False) -> None:
        """Readers go; requests that nobody is left for end."""
        read = [self._directory.core_key(key) for key in keys]
        ended = tuple(ended for key in keys for ended in self._directory.leave(key, grace_us, now, keeps))
        if ended:
            self._arrival(Abort(ended), now)
        for key in ended:
            self._core.abort(key, now)
        for key in read:  # the ones who stay may be the ones who do not read, or the other way round
            entry = self._directory.of_key(key)
            if entry is not None:
                self._pause(key, self._directory.pauses(entry), now)

    def _pause(self, key: int, paused: bool, now: int) -> None:
        request = self._core.request(key)
        if request is not None and request.paused != paused:
            self._arrival(Pause(key, paused), now)
            self._core.pause(key, paused, now)

    def cancel(self, key: int, reason: FinishReason, now: int) -> None:
        """Somebody other than its readers ends a request of the core."""
        if self._record is not None:
            self._record.control(now, "abort", {"key": key, "reason": int(reason)})
        self._core.abort(key, now, reason)

    def _submit(self, slot: int, submit: Submit, now: int) -> None:
        identity = submit.identity
        if identity.request_id and self._core.request(submit.key) is None:
            entry = self._directory.find(identity.owner, identity.request_id)
            if entry is not None and identity.join and entry.submit.identity.digest == identity.digest:
                self._send_attached(slot, entry, submit.key, now)
                return
            if entry is not None and entry.request is not None:
                self._answer(slot, Rejected(submit.key, RejectReason.REQUEST_ID_IN_USE))
                return
        answer = self._admit(submit, now)
        self._answer(slot, answer)
        if isinstance(answer, Accepted) and identity.request_id:
            request = self._core.request(submit.key)
            if request is not None:  # else it came back complete, and its end follows
                self._directory.open(submit, request, answer.queue_position, now)

    def _attach(self, slot: int, message: Attach, now: int) -> None:
        entry = self._directory.find(message.owner, message.request_id)
        if entry is None or not (entry.submit.identity.keep or message.key in entry.readers):
            self._answer(slot, Rejected(message.key, RejectReason.REQUEST_UNKNOWN))
        else:
            self._send_attached(slot, entry, message.key, now)

    def _send_attached(self, slot: int, entry: Entry, key: int, now: int) -> None:
        """Before any batch that tells this reader of what follows."""
        request = entry.request
        outputs = self._core.outputs_of(request) if request is not None else ()
        untold = self._core.untold_logprobs(request) if request is not None else ((), ())
        self._directory.attach(entry, key)
        self._frontends.send(slot, self._directory.attached(entry, key, outputs, now, untold))
        if request is not None:
            self._pause(entry.key, self._directory.pauses(entry), now)

    def _admit(self, submit: Submit, now: int) -> Accepted | Rejected:
        if not submit.history:  # else it was accepted once, and comes back
            if self.is_draining or (self.refuse_from is not None and now >= self.refuse_from):
                return Rejected(submit.key, RejectReason.DRAINING, retry_after_ms=RETRY_AFTER_MS)
            if self._epochs.is_braking(now):
                return Rejected(submit.key, RejectReason.RECOVERING, retry_after_ms=RETRY_AFTER_MS)
        self._arrival(submit, now)
        try:
            return self._core.submit(submit, now)
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
        """A front end has vanished: its unsent answers are void, and its requests end but for those that others may read on."""
        self._answers.pop(slot, None)
        self._deferred = deque((f, m) for f, m in self._deferred if f.slot != slot)
        self._returned = [(f, m) for f, m in self._returned if f.slot != slot]
        core = self._epochs.core
        if core is None:
            return
        spared = sorted(self._directory.keys_of(slot))  # those that end here too: by the word of it they leave the directory
        for key in self._directory.drop_slot(slot, now):
            self.cancel(key, FinishReason.CANCELLED, now)
        if self._record is not None:
            self._record.control(now, "drop_frontend", {"slot": slot, "spared": spared})
        core.drop_frontend(slot, now, spared)

    def expire(self, now: int) -> None:
        """Once in a while: requests that nobody came back for end, and what was kept long enough is forgotten."""
        for key in self._directory.expire(now):
            self.cancel(key, FinishReason.CANCELLED, now)

    def take_batches(self, now: int) -> list[tuple[int, FrontendBatch]]:
        """One batch per front end that has something to learn: answers to its submits first, then what the core has for it."""
        core = self._epochs.core
        batches = core.take_batches() if core is not None else []
        if batches:
            batches, told = self._directory.relay(batches), batches
            self._close_ended(told, now)
        if not self._answers:
            return batches
        merged = dict(batches)
        for slot, (accepted, rejected) in self._answers.items():
            batch = merged.get(slot) or FrontendBatch(step=self._epochs.step)
            merged[slot] = msgspec.structs.replace(batch, accepted=(*batch.accepted, *accepted), rejected=(*batch.rejected, *rejected))
        self._answers.clear()
        return list(merged.items())

    def _close_ended(self, batches: list[tuple[int, FrontendBatch]], now: int) -> None:
        """Requests whose last sequence ended leave the directory, or are kept in it."""
        for _, batch in batches:
            for finished in batch.finished:
                entry = self._directory.of_key(finished.key)
                if entry is not None and entry.request is not None and not entry.request.num_open:
                    outputs = self._core.outputs_of(entry.request) if entry.submit.identity.keep else ()
                    self._directory.close(entry, outputs, now)
