"""Who reads which request: requests by (owner, request id), their readers, and what is kept of those that ended.

The core knows a request by one key. Here it gets any number of readers, each under a key of its front end's, so that any front end can
join or resume what another began; a request without readers goes on for a granted time. Decides nothing about tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from pagecast_scheduler.core.request import NEVER, Request
from pagecast_scheduler.engine.reader_copies import add_copies
from pagecast_wire.control import MAX_KEPT, MAX_KEPT_BYTES, Attached, EarlierLogprobs, Kept, kept_bytes
from pagecast_wire.intake import KEY_BITS, Finished, FrontendBatch, PromptLogprobs, Submit, TokenLogprobs

MAX_ORPHANS = 1024
"""Live requests without a reader; one more ends the oldest of them."""
MS = 1000
MAX_AGE_MS = 1 << 40

Untold = tuple[Sequence[TokenLogprobs], Sequence[PromptLogprobs]]


@dataclass(slots=True, eq=False)
class Entry:
    """One findable request. Times are absolute microseconds.

    key: in the core. request: the core's, None once it has ended. readers: reader key -> whether it wants the request paused.
    keepers: keys under which front ends only follow it, for a scheduler after this one. until: when it ends (live) or is
    forgotten (ended); NEVER while it has readers. tokens, ends: of an ended request.
    """

    submit: Submit
    request: Request | None
    position: int
    accepted_at: int
    readers: dict[int, bool] = field(default_factory=dict)
    keepers: set[int] = field(default_factory=set)
    until: int = NEVER
    tokens: tuple[bytes, ...] = ()
    ends: tuple[Finished, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def key(self) -> int:
        return self.submit.key

    @property
    def name(self) -> tuple[str, str]:
        return self.submit.identity.owner, self.submit.identity.request_id

    @property
    def num_bytes(self) -> int:
        return kept_bytes(self.submit, self.tokens, self.logprobs, self.prompt_logprobs)

    @property
    def told(self) -> set[int]:
        """Every key that news of it goes to."""
        return self.keepers.union(self.readers)


class Directory:
    """Every findable request. grace_us: for requests whose front end died. retention_us: for ended requests."""

    def __init__(self, grace_us: int, retention_us: int) -> None:
        self._grace_us = grace_us
        self._retention_us = retention_us
        self._by_name: dict[tuple[str, str], Entry] = {}
        self._by_key: dict[int, Entry] = {}  # live ones, by the core's key
        self._reads: dict[int, Entry] = {}  # by the key of a reader or keeper
        self._relayed: dict[int, Entry] = {}  # live ones whose readers are not just the front end that the core tells
        self._orphans: dict[int, Entry] = {}  # live ones without readers, oldest first
        self._kept: OrderedDict[int, Entry] = OrderedDict()
        self._kept_bytes = 0

    def find(self, owner: str, request_id: str) -> Entry | None:
        """The live or kept request of this name."""
        return self._by_name.get((owner, request_id))

    def of_key(self, key: int) -> Entry | None:
        """The live request with this key in the core."""
        return self._by_key.get(key)

    def all(self) -> list[Entry]:
        """Every live and kept request."""
        return list(self._by_name.values())

    def live(self) -> list[Entry]:
        """Every live request, oldest first."""
        return list(self._by_key.values())

    def open(self, submit: Submit, request: Request, position: int, now: int) -> None:
        """A request with an id was accepted; the front end that sent it is its first reader."""
        name = (submit.identity.owner, submit.identity.request_id)
        earlier = self._by_name.get(name)
        if earlier is not None:
            self._forget(earlier)
        entry = Entry(msgspec.structs.replace(submit, history=()), request, position, now)
        self._by_name[name] = self._by_key[submit.key] = entry
        self._add_reader(entry, submit.key)

    def attach(self, entry: Entry, key: int) -> None:
        """One more reader. Of an ended request only `attached` is needed."""
        if entry.request is not None:
            self._orphans.pop(entry.key, None)
            entry.until = NEVER
            self._add_reader(entry, key)

    def attached(self, entry: Entry, key: int, outputs: tuple[bytes, ...], now: int, untold: Untold = ((), ())) -> Attached:
        """All there is so far, for a reader. outputs: tokens of a live request, per sequence. untold: records that belong to the newest of
        them, and of its prompt, which nobody was told yet."""
        request, submit = entry.request, entry.submit
        ends, left = entry.ends, {}
        if request is not None:
            ends = tuple(seq.end for seq in request.sequences if seq.end is not None)
            left = {
                "deadline_ms": _left(request.deadline, now), "time_budget_ms": _left(request.budget_end, now),
                "max_queue_ms": -1 if request.started else _left(request.queue_end, now),
            }  # fmt: skip
        submit = msgspec.structs.replace(submit, key=key, history=outputs if request is not None else entry.tokens, **left)
        renamed = tuple(msgspec.structs.replace(end, key=key) for end in ends)
        logprobs = tuple(msgspec.structs.replace(item, key=key) for item in (*entry.logprobs, *untold[0]))
        of_prompt = tuple(msgspec.structs.replace(part, key=key) for part in (*entry.prompt_logprobs, *untold[1]))
        return Attached(submit, entry.position, max(0, now - entry.accepted_at) // MS, renamed, logprobs, of_prompt)

    def core_key(self, key: int) -> int:
        """The core's key of the request that this reader reads; requests without an id have their own."""
        entry = self._reads.get(key)
        return key if entry is None else entry.key

    def leave(self, key: int, grace_us: int, now: int, keeps: bool = False) -> list[int]:
        """A reader goes; its front end may keep the request. Core keys of requests that end over it: its own, or the oldest orphan's."""
        entry = self._reads.pop(key, None)
        if entry is None:
            return [] if key in self._by_key else [key]
        was_reader = entry.readers.pop(key, None) is not None
        entry.keepers.discard(key)
        if keeps and grace_us and entry.submit.identity.keep:
            entry.keepers.add(key)
            self._reads[key] = entry
        self._update_relay(entry)
        if entry.readers or not was_reader:
            return []
        if not grace_us or not entry.submit.identity.keep:
            return [entry.key]
        entry.until = now + grace_us
        self._orphans[entry.key] = entry
        return [next(iter(self._orphans))] if len(self._orphans) > MAX_ORPHANS else []

    def drop_slot(self, slot: int, now: int) -> list[int]:
        """A front end vanished: its readers are gone. Core keys of requests that end over it."""
        return [ended for key in [k for k in self._reads if k >> KEY_BITS == slot] for ended in self.leave(key, self._grace_us, now)]

    def keys_of(self, slot: int) -> set[int]:
        """Core keys of live requests that this front end began."""
        return {key for key in self._by_key if key >> KEY_BITS == slot}

    def pause(self, key: int, paused: bool) -> tuple[int, bool]:
        """A reader wants its request paused, or on again. (core key, whether it is to be paused): only if every reader wants that."""
        entry = self._reads.get(key)
        if entry is None:
            return key, paused
        if key in entry.readers:
            entry.readers[key] = paused
        return entry.key, self.pauses(entry)

    def pauses(self, entry: Entry) -> bool:
        """Whether a live request is to be paused for its readers."""
        return bool(entry.readers) and all(entry.readers.values())

    def close(self, entry: Entry, outputs: tuple[bytes, ...], now: int) -> None:
        """The core has ended a request. outputs: its tokens, per sequence; kept if readers may still come for them."""
        request = entry.request
        assert request is not None
        for key in entry.told:
            del self._reads[key]
        for table in (self._by_key, self._relayed, self._orphans):
            table.pop(entry.key, None)
        if not entry.submit.identity.keep or not self._retention_us:
            self._by_name.pop(entry.name, None)
            return
        entry.tokens = outputs
        entry.ends = tuple(seq.end for seq in request.sequences if seq.end is not None)
        entry.request, entry.until = None, now + self._retention_us
        entry.readers.clear()
        entry.keepers.clear()
        self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        """Kept ones are in the order in which they are forgotten; what other front ends bring back later may come before some of them."""
        later = list(takewhile(lambda key: self._kept[key].until > entry.until, reversed(self._kept)))
        self._kept[entry.key] = entry
        for key in reversed(later):
            self._kept.move_to_end(key)
        self._kept_bytes += entry.num_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept.values())))

    def restore(self, kept: Kept, now: int) -> None:
        """What a scheduler before this one kept. Of several requests of one name the latest counts, and a live one before all."""
        attached, left_us = kept.attached, min(kept.left_ms * MS, self._retention_us)
        submit, age_us = msgspec.structs.replace(attached.submit, history=()), min(attached.elapsed_ms, MAX_AGE_MS) * MS
        entry = Entry(
            submit, None, attached.queue_position, now - age_us, until=now + left_us, tokens=attached.submit.history,
            ends=attached.finished, logprobs=list(attached.logprobs), prompt_logprobs=list(attached.prompt_logprobs),
        )  # fmt: skip
        known = self._by_name.get(entry.name)
        if left_us <= 0 or (known is not None and (known.request is not None or known.until >= entry.until)):
            return
        if known is not None:
            self._forget(known)
        self._by_name[entry.name] = entry
        self._keep(entry)

    def restore_logprobs(self, earlier: EarlierLogprobs) -> None:
        """Records of tokens that a live request was brought back with, perhaps by several front ends."""
        entry = self._reads.get(earlier.key)
        if entry is None:
            return
        known = {(record.sequence, record.offset) for record in entry.logprobs}
        entry.logprobs += [record for record in earlier.records if (record.sequence, record.offset) not in known]
        entry.logprobs.sort(key=lambda record: (record.sequence, record.offset))

    def expire(self, now: int) -> list[int]:
        """Forget what was kept long enough. Core keys of requests that nobody came back for."""
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget(next(iter(self._kept.values())))
        return [entry.key for entry in self._orphans.values() if entry.until <= now]

    def relay(self, batches: list[tuple[int, FrontendBatch]]) -> list[tuple[int, FrontendBatch]]:
        """The same batches, and what they say of relayed requests once more for every reader that the core does not know."""
        for _, batch in batches:
            if batch.logprobs or batch.prompt_logprobs:
                self._keep_logprobs(batch)
        if not self._relayed:
            return batches
        readers = {key: sorted(entry.told - {key}) for key, entry in self._relayed.items()}
        return add_copies(batches, readers)

    def _keep_logprobs(self, batch: FrontendBatch) -> None:
        for record in batch.logprobs:
            entry = self._by_key.get(record.key)
            if entry is not None:
                entry.logprobs.append(record)
        for part in batch.prompt_logprobs:
            entry = self._by_key.get(part.key)
            if entry is not None:
                entry.prompt_logprobs.append(part)

    def _add_reader(self, entry: Entry, key: int) -> None:
        entry.readers[key] = False
        self._reads[key] = entry
        self._update_relay(entry)

    def _update_relay(self, entry: Entry) -> None:
        if entry.told - {entry.key}:
            self._relayed[entry.key] = entry
        else:
            self._relayed.pop(entry.key, None)

    def _forget(self, entry: Entry) -> None:
        if self._kept.pop(entry.key, None) is not None:
            self._kept_bytes -= entry.num_bytes
        if self._by_name.get(entry.name) is entry:
            del self._by_name[entry.name]


def _left(time: int, now: int) -> int:
    """Milliseconds until an absolute time; -1 for NEVER."""
    return -1 if time >= NEVER else max(0, time - now) // MS
