"""The front ends: who is connected, under which slot, and whether one has gone for good.

A slot is given away once and stays with its front end across reconnects and restarts of the scheduler, because it is the upper
part of every key that the front end uses. One that was given up and comes back all the same, having been stopped for a while, gets
another: what its requests have put out since went to nobody, so that it has to join them anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from pagecast_scheduler.engine.hello import foreign_build, wire_mismatch
from pagecast_scheduler.engine.link import ForeignHello, Router
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.processes import ProcessGone, Watched, is_alive
from pagecast_scheduler.engine.recovery import SECOND
from pagecast_scheduler.engine.run_state import KnownFrontend
from pagecast_wire.intake import (
    EngineLimits,
    EngineStatus,
    Farewell,
    FrontendHello,
    FrontendPing,
    FrontendRefused,
    FrontendWelcome,
    HelloWanted,
    ModelFacts,
    Ready,
)

SILENCE = 5 * SECOND
"""A front end pings every second; after so long without a word it has vanished (microseconds)."""

GRACE = SECOND // 5
"""Between the death of a front end's process and the end of its requests: its last words may still be in the socket."""

MAX_SLOT = (1 << 24) - 1
"""Keys are 64 bits, the front end counts in the lower 40."""


@dataclass
class Frontend:
    """One connected front end. expires: time at which it is given up, set once its process or link is known to be gone. has_left: it
    has said that it ends."""

    slot: int
    identity: bytes
    incarnation: str
    process: Watched
    pid_namespace: int
    heard: int
    is_resubmitting: bool
    expires: int | None = None
    is_welcomed: bool = False
    has_left: bool = False


class Frontends:
    """Handles the connection part of the front ends' messages; requests are the caller's to pass on."""

    def __init__(self, router: Router, incarnation: str, next_slot: int, known: Iterable[KnownFrontend]) -> None:
        """known: front ends of the scheduler before this one. Those that still live are expected back."""
        self._log = logger("frontends")
        self._router = router
        self._incarnation = incarnation
        self._welcome: tuple[ModelFacts, EngineLimits] | None = None
        self._asked: set[bytes] = set()
        self._by_identity: dict[bytes, Frontend] = {}
        self._by_slot: dict[int, Frontend] = {}
        self._expected = {f.slot for f in known if is_alive(f.pid, f.pid_namespace)}
        self._given_up: set[int] = set()  # slots of front ends that vanished in this scheduler's life
        self.next_slot = next_slot
        self.num_refused = 0
        self.changed = False  # who is connected differs from the last `known()` that was saved

    def receive(self, identity: bytes, message: Any, now: int) -> Frontend | None:
        """Take one message. The sender, if the message is a request of a front end that is known and welcome; None otherwise."""
        if isinstance(message, FrontendHello):
            self._on_hello(identity, message, now)
            return None
        if isinstance(message, ForeignHello):
            self._refuse(identity, foreign_build(message))
            return None
        frontend = self._by_identity.get(identity)
        if frontend is None:
            if not isinstance(message, Farewell):
                self._ask_for_hello(identity)
            return None
        frontend.heard = now
        if isinstance(message, Farewell):
            frontend.has_left, frontend.expires = True, now
            return None
        if isinstance(message, FrontendPing):
            return None
        if isinstance(message, Ready):
            frontend.is_resubmitting = False
            self._expected.discard(frontend.slot)
            return None
        return frontend if frontend.is_welcomed else None

    def _on_hello(self, identity: bytes, hello: FrontendHello, now: int) -> None:
        self._asked.discard(identity)
        reason = wire_mismatch(hello.wire_version, hello.wire_digest)
        if reason is None and not -1 <= hello.slot <= MAX_SLOT:
            reason = f"slot {hello.slot}, at most {MAX_SLOT}"
        if reason is not None:
            self._refuse(identity, reason)
            return
        frontend = self._connected(hello.incarnation)
        if frontend is None:
            try:
                process = Watched(hello.pid, hello.pid_namespace)
            except ProcessGone:
                return
            slot, returns = self._choose_slot(hello.slot)
            frontend = Frontend(slot, identity, hello.incarnation, process, hello.pid_namespace, now, is_resubmitting=returns)
            self._by_slot[slot] = frontend
            self.changed = True
            self._log.info("front end joined", slot=slot, pid=hello.pid, incarnation=hello.incarnation, returns=returns)
        self._by_identity.pop(frontend.identity, None)
        frontend.identity, frontend.heard, frontend.expires, frontend.has_left = identity, now, None, False
        self._by_identity[identity] = frontend
        self._send_welcome(frontend)

    def _connected(self, incarnation: str) -> Frontend | None:
        return next((f for f in self._by_slot.values() if f.incarnation == incarnation), None)

    def _choose_slot(self, wanted: int) -> tuple[int, bool]:
        """The slot of a newly connected front end, and whether it comes back with requests of its own."""
        if wanted > 0 and wanted not in self._by_slot and wanted not in self._given_up:
            self.next_slot = max(self.next_slot, wanted + 1)
            return wanted, True
        slot = self.next_slot
        self.next_slot += 1
        return slot, wanted > 0

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.num_refused += 1
        self._log.error("front end refused", reason=reason)
        self._router.send(identity, FrontendRefused(reason))

    def _ask_for_hello(self, identity: bytes) -> None:
        if identity not in self._asked:
            self._asked.add(identity)
            self._router.send(identity, HelloWanted(self._incarnation))

    def set_welcome(self, model: ModelFacts, limits: EngineLimits, now: int) -> None:
        """The model's facts are known: welcome whoever waits, and from now on everyone at once."""
        self._welcome = (model, limits)
        for frontend in self._by_slot.values():
            frontend.heard = now
            self._send_welcome(frontend)

    def _send_welcome(self, frontend: Frontend) -> None:
        if self._welcome is not None:
            frontend.is_welcomed = True
            self._send(frontend, FrontendWelcome(frontend.slot, self._incarnation, *self._welcome))

    def send(self, slot: int, message: msgspec.Struct) -> None:
        """A batch or an answer for one front end. A slot that nobody holds any more is passed over."""
        frontend = self._by_slot.get(slot)
        if frontend is not None:
            self._send(frontend, message)

    def broadcast(self, status: EngineStatus) -> None:
        """The same status to every connected front end."""
        for frontend in self._by_slot.values():
            self._send(frontend, status)

    def _send(self, frontend: Frontend, message: msgspec.Struct) -> None:
        if self._router.send(frontend.identity, message) != "sent" and frontend.expires is None:
            frontend.expires = frontend.heard + SILENCE

    def exited(self, fd: int, now: int) -> None:
        """The process behind this pidfd has ended."""
        for frontend in self._by_slot.values():
            if frontend.process.fd == fd:
                frontend.process.close()
                frontend.expires = now if frontend.has_left else now + GRACE

    def take_vanished(self, now: int) -> list[int]:
        """Slots whose front ends are given up now, lost or by their own word; their requests are to be cancelled."""
        self._asked.clear()
        late = [f for f in self._by_slot.values() if _is_gone(f, now)]
        for frontend in late:
            facts = {"slot": frontend.slot, "pid": frontend.process.pid}
            if frontend.has_left:
                self._log.info("front end left", **facts)
            else:
                self._log.warning("front end vanished", **facts, silent_us=now - frontend.heard)
            frontend.process.close()
            del self._by_slot[frontend.slot]
            self._given_up.add(frontend.slot)
            self._by_identity.pop(frontend.identity, None)
            self._expected.discard(frontend.slot)
            self.changed = True
        return [frontend.slot for frontend in late]

    def forgive(self, pause: int) -> None:
        """The scheduler itself was stopped for so long (microseconds)."""
        for frontend in self._by_slot.values():
            frontend.heard += pause

    def awaits_requests(self) -> bool:
        """Some front end may still bring back requests that a scheduler before this one was serving."""
        return bool(self._expected) or any(f.is_resubmitting for f in self._by_slot.values())

    def stop_waiting(self) -> None:
        """Go on without those that have not come back."""
        self._expected.clear()
        for frontend in self._by_slot.values():
            frontend.is_resubmitting = False

    def known(self) -> tuple[KnownFrontend, ...]:
        """Who is connected, for the scheduler after this one."""
        self.changed = False
        return tuple(KnownFrontend(f.slot, f.incarnation, f.process.pid, f.pid_namespace) for f in self._by_slot.values())

    @property
    def num_connected(self) -> int:
        """Front ends that have said hello and are not given up."""
        return len(self._by_slot)

    @property
    def pidfds(self) -> list[int]:
        """What to poll for the end of a process."""
        return [f.process.fd for f in self._by_slot.values() if f.process.fd >= 0]


def _is_gone(frontend: Frontend, now: int) -> bool:
    """Only a welcomed front end has a slot to ping with; before that its process alone tells."""
    if frontend.expires is not None and now >= frontend.expires:
        return True
    return frontend.is_welcomed and now >= frontend.heard + SILENCE
