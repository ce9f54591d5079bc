"""What front ends ask the scheduler beside submitting requests: about requests of any front end, and on behalf of operators.

Every question gets exactly one answer, with its ticket.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from pagecast_scheduler.engine.directory import Directory, Entry
from pagecast_scheduler.engine.epochs import Epochs
from pagecast_scheduler.engine.intake import Intake
from pagecast_wire.control import CancelReport, CancelRequests, NotNow
from pagecast_wire.sampling import FinishReason

QUESTIONS = (CancelRequests,)


class Questions:
    """Answers questions between two turns of the core."""

    def __init__(self, epochs: Epochs, intake: Intake, directory: Directory) -> None:
        self._epochs = epochs
        self._intake = intake
        self._directory = directory

    def answer(self, question: Any, now: int) -> msgspec.Struct:
        """The answer to one question."""
        if self._epochs.core is None or self._intake.is_holding:
            return NotNow(question.ticket)
        return self._cancel(question, now)

    def _cancel(self, question: CancelRequests, now: int) -> CancelReport:
        reason = FinishReason.CANCELLED_BY_ADMIN if question.every_owner else FinishReason.CANCELLED_BY_API
        live, ended = [], []
        for entry in self._named(question):
            (live if entry.request is not None else ended).append(entry.name[1])
            if entry.request is not None:
                self._intake.cancel(entry.key, reason, now)
        return CancelReport(question.ticket, tuple(live), tuple(ended))

    def _named(self, question: CancelRequests) -> Iterable[Entry]:
        if question.every_owner and not question.request_ids:
            return self._directory.live()
        if question.every_owner:
            wanted = set(question.request_ids)
            return [entry for entry in self._directory.all() if entry.name[1] in wanted]
        found = [self._directory.find(question.owner, request_id) for request_id in question.request_ids]
        return [entry for entry in found if entry is not None]
