"""Requests with several readers, with none, and with late ones: what the scheduler keeps for front ends that did not begin them."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.engine_rig import RigFrontend, RigWorker, engine_thread, rig_workers

from pagecast_scheduler.engine.loop import Engine
from pagecast_wire.control import Attach, Attached, CancelReport, CancelRequests, Leave
from pagecast_wire.intake import KEY_BITS, Abort, Farewell, FrontendBatch, Identity, Pause, RejectReason, Submit
from pagecast_wire.sampling import FinishReason

PROMPT = list(range(1, 40))


class Reader(RigFrontend):
    """A front end whose requests have ids, and that attaches to others'."""

    def __init__(self, run_dir: Path, pid: int | None = None) -> None:
        super().__init__(run_dir, pid)
        self.attached: dict[int, Attached] = {}
        self.reports: list[CancelReport] = []
        self._attaches = 0

    def begin(self, request_id: str, n: int, asked: str = "this", **identity: Any) -> int:
        digest = hashlib.sha256(asked.encode()).digest()
        fields = {"owner": "ada", "keep": True, "spec": b"view", **identity}
        return self.submit(PROMPT, n, seed=9, identity=Identity(request_id=request_id, digest=digest, **fields))

    def attach(self, request_id: str, owner: str = "ada") -> int:
        self._attaches += 1
        key = self.slot << KEY_BITS | 1 << 30 | self._attaches
        self.send(Attach(key, owner, request_id))
        return key

    def wait_attached(self, key: int) -> Attached:
        self.pump(lambda: key in self.attached or key in self.rejected, "attached")
        return self.attached[key]

    def _take(self, message: Any) -> None:
        if isinstance(message, Attached):
            key = message.submit.key
            self.attached[key], self.submits[key] = message, message.submit
            self.tokens[key, 0] = [*memoryview(message.submit.history[0]).cast("I")]
            self.finished |= {(key, finished.sequence): finished for finished in message.finished}
        elif isinstance(message, CancelReport):
            self.reports.append(message)
        else:
            super()._take(message)

    def _take_batch(self, batch: FrontendBatch) -> None:
        """The first batch after an attachment may repeat what that told."""
        for at in range(len(batch.keys) // 8):
            key = int.from_bytes(batch.keys[8 * at : 8 * at + 8], "little")
            offset = int.from_bytes(batch.offsets[4 * at : 4 * at + 4], "little")
            if key in self.attached and offset < len(self.tokens[key, 0]):
                del self.tokens[key, 0][offset:]
        for finished in batch.finished:
            if finished.key in self.attached:
                self.finished.pop((finished.key, finished.sequence), None)
        super()._take_batch(batch)


class Told:
    """A log that notes level and event of every line."""

    def __init__(self, lines: list[tuple[str, str]]) -> None:
        self._lines = lines

    def info(self, event: str, **facts: Any) -> None:
        self._lines.append(("info", event))

    def warning(self, event: str, **facts: Any) -> None:
        self._lines.append(("warning", event))


class Rig:
    """An engine with one rank and two front ends."""

    def __init__(self, run_dir: Path, engine: Engine, worker: RigWorker) -> None:
        self.run_dir, self.engine, self.worker = run_dir, engine, worker
        self.first, self.second = Reader(run_dir).wait_serving(), Reader(run_dir).wait_serving()

    def hold(self) -> None:
        """Nothing moves from here on, until `release`."""
        self.worker.hold_results.set()

    def release(self) -> None:
        self.worker.hold_results.clear()


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    options = getattr(request, "param", {})
    with rig_workers(tmp_path, 1) as workers, engine_thread(tmp_path, **options) as engine:
        made = Rig(tmp_path, engine, workers[0])
        yield made
        made.release()
        made.first.close()
        made.second.close()


def test_two_front_ends_read_one_request(rig: Rig) -> None:
    rig.hold()
    key = rig.first.begin("r", 300)
    rig.first.pump(lambda: key in rig.first.accepted)
    other = rig.second.attach("r")
    told = rig.second.wait_attached(other)
    assert told.submit.identity.spec == b"view" and told.submit.prompt == rig.first.submits[key].prompt
    rig.release()
    rig.first.wait_finished(key)
    rig.second.wait_finished(other)
    rig.first.expect(key)
    rig.second.expect(other)
    assert rig.first.finished[key, 0].usage == rig.second.finished[other, 0].usage


def test_one_reader_goes_and_the_other_reads_on(rig: Rig) -> None:
    rig.hold()
    key = rig.first.begin("r", 300)
    rig.first.pump(lambda: key in rig.first.accepted)
    other = rig.second.attach("r")
    rig.second.wait_attached(other)
    rig.first.send(Abort((key,)))
    rig.release()
    rig.second.wait_finished(other)
    rig.second.expect(other)


def test_a_request_goes_on_without_readers_for_its_grace(rig: Rig) -> None:
    rig.hold()
    key = rig.first.begin("r", 300)
    rig.first.pump(lambda: key in rig.first.accepted)
    rig.first.send(Leave((key,), 60_000))
    rig.first.send(Abort((key,)))  # a front end that leaves says no more of it; if it does, nothing happens
    rig.release()
    other = rig.second.attach("r")
    rig.second.wait_attached(other)
    rig.second.wait_finished(other)
    rig.second.expect(other)


def test_a_grace_that_runs_out_ends_the_request(rig: Rig) -> None:
    rig.hold()
    key = rig.first.begin("r", 300)
    rig.first.pump(lambda: key in rig.first.accepted)
    rig.first.send(Leave((key,), 1))
    rig.first.pump(lambda: (key, 0) in rig.first.finished)
    assert rig.first.finished[key, 0].reason == FinishReason.CANCELLED


@pytest.mark.parametrize("rig", [{"resume_grace_s": 60}, {"resume_grace_s": 0}], indirect=True)
def test_a_dead_front_ends_requests_go_on_for_who_attaches(rig: Rig) -> None:
    stand_in = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    doomed = Reader(rig.run_dir, stand_in.pid).wait_serving()
    rig.hold()
    kept = doomed.begin("r", 300)
    lost = doomed.submit(PROMPT, 300)  # without an id nobody can find it
    whole = doomed.begin("w", 300, keep=False)
    doomed.pump(lambda: {kept, lost, whole} <= set(doomed.accepted))
    connected = rig.engine._frontends.num_connected
    stand_in.kill()
    stand_in.wait()
    doomed.close()
    grace = rig.engine._config.resume_grace_s
    rig.first.pump(lambda: rig.engine._frontends.num_connected == connected - 1, "vanished")
    other = rig.second.attach("r")
    if not grace:
        rig.second.pump(lambda: other in rig.second.rejected or other in rig.second.attached)
        assert other in rig.second.rejected or rig.second.attached[other].finished
        return
    rig.second.wait_attached(other)
    rig.release()
    rig.second.wait_finished(other)
    rig.second.expect(other)
    unknown = rig.second.attach("w")
    rig.second.pump(lambda: unknown in rig.second.rejected)
    rig.first.pump(lambda: (now := rig.first.status) is not None and now.num_blocks_referenced == now.num_running == 0)


def test_the_id_of_a_request_that_ended_with_its_front_end_is_free(rig: Rig) -> None:
    stand_in = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    doomed = Reader(rig.run_dir, stand_in.pid).wait_serving()
    rig.hold()
    lost = doomed.begin("w", 300, keep=False)
    doomed.pump(lambda: lost in doomed.accepted)
    connected = rig.engine._frontends.num_connected
    stand_in.kill()
    stand_in.wait()
    doomed.close()
    rig.first.pump(lambda: rig.engine._frontends.num_connected == connected - 1, "vanished")
    rig.release()
    again = rig.first.begin("w", 20, keep=False)
    rig.first.pump(lambda: again in rig.first.accepted or again in rig.first.rejected)
    assert again not in rig.first.rejected
    rig.first.wait_finished(again)
    rig.first.expect(again)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_front_end_that_takes_its_leave_is_dropped_as_a_lost_one_but_without_an_alarm(
    rig: Rig, says_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(rig.engine._frontends, "_log", Told(told))
    stand_in = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    leaver = Reader(rig.run_dir, stand_in.pid).wait_serving()
    rig.hold()
    key, kept = leaver.submit(PROMPT, 300), leaver.begin("r", 300)
    leaver.pump(lambda: {key, kept} <= set(leaver.accepted))
    connected = rig.engine._frontends.num_connected
    if says_so:
        leaver.send(Farewell())
        rig.first.pump(lambda: rig.engine._frontends.num_connected == connected - 1, "dropped, although its process lives")
    stand_in.kill()
    stand_in.wait()
    rig.first.pump(lambda: rig.engine._frontends.num_connected == connected - 1, "dropped")
    leaver.close()
    assert [event for event in told if event[1] != "front end joined"] == [
        ("info", "front end left") if says_so else ("warning", "front end vanished")
    ]
    other = rig.second.attach("r")
    rig.second.wait_attached(other)
    rig.release()
    rig.second.wait_finished(other)
    rig.second.expect(other)
    rig.first.pump(lambda: (now := rig.first.status) is not None and now.num_blocks_referenced == now.num_running == 0)


@pytest.mark.parametrize("rig", [{"resume_retention_s": 60}, {"resume_retention_s": 0}], indirect=True)
def test_an_ended_request_is_kept_for_late_readers(rig: Rig) -> None:
    key = rig.first.begin("r", 20)
    rig.first.wait_finished(key)
    other = rig.second.attach("r")
    rig.second.pump(lambda: other in rig.second.attached or other in rig.second.rejected)
    if not rig.engine._config.resume_retention_s:
        assert rig.second.rejected[other].reason is RejectReason.REQUEST_UNKNOWN
        return
    rig.second.expect(other)
    assert rig.second.finished[other, 0].usage == rig.first.finished[key, 0].usage
    assert rig.second.attach("r", owner="eve") and rig.second.pump(lambda: len(rig.second.rejected) == 1) is None


def test_an_id_is_unique_while_its_request_lives(rig: Rig) -> None:
    rig.hold()
    first = rig.first.begin("r", 50)
    rig.first.pump(lambda: first in rig.first.accepted)
    again = rig.second.begin("r", 50)
    other = rig.second.begin("r", 50, asked="that", join=True)
    eve = rig.second.begin("r", 50, owner="eve")
    joined = rig.second.begin("r", 50, join=True)
    rig.second.wait_attached(joined)
    rig.second.pump(lambda: {again, other} <= set(rig.second.rejected) and eve in rig.second.accepted)
    assert {rig.second.rejected[key].reason for key in (again, other)} == {RejectReason.REQUEST_ID_IN_USE}
    rig.release()
    rig.second.wait_finished(joined, eve)
    rig.second.expect(joined)
    late = rig.second.begin("r", 50, join=True)  # kept: joined even now
    rig.second.wait_attached(late)
    rig.second.expect(late)
    anew = rig.second.begin("r", 50)  # an ended request's id is free
    rig.second.pump(lambda: anew in rig.second.accepted)
    rig.second.wait_finished(anew)


def test_a_request_pauses_only_if_every_reader_wants_it(rig: Rig) -> None:
    rig.hold()
    key = rig.first.begin("r", 400)
    rig.first.pump(lambda: key in rig.first.accepted)
    other = rig.second.attach("r")
    rig.second.wait_attached(other)
    rig.first.send(Pause(key, True))
    rig.second.send(Pause(other, True))
    core = rig.engine._epochs.core
    assert core is not None
    rig.second.pump(lambda: (request := core.request(key)) is not None and request.paused, "paused")
    rig.second.send(Leave((other,), 0))  # the only other reader does not read either
    assert (request := core.request(key)) is not None and request.paused
    again = rig.second.attach("r")
    rig.second.wait_attached(again)
    rig.release()
    rig.second.wait_finished(again)
    rig.second.expect(again)


def test_cancel_by_id(rig: Rig) -> None:
    rig.hold()
    mine, theirs = rig.first.begin("r", 300), rig.first.begin("r", 300, owner="eve")
    rig.first.pump(lambda: {mine, theirs} <= set(rig.first.accepted))
    rig.second.send(CancelRequests(1, ("r", "nobody"), "ada"))
    rig.second.pump(lambda: len(rig.second.reports) == 1)
    assert rig.second.reports[-1] == CancelReport(1, ("r",), ())
    rig.first.pump(lambda: (mine, 0) in rig.first.finished)
    assert rig.first.finished[mine, 0].reason == FinishReason.CANCELLED_BY_API and (theirs, 0) not in rig.first.finished
    rig.second.send(CancelRequests(2, ("r",), "ada"))
    rig.second.send(CancelRequests(3, every_owner=True))
    rig.second.pump(lambda: len(rig.second.reports) == 3)
    assert rig.second.reports[1:] == [CancelReport(2, (), ("r",)), CancelReport(3, ("r",), ())]
    rig.first.pump(lambda: (theirs, 0) in rig.first.finished)
    assert rig.first.finished[theirs, 0].reason == FinishReason.CANCELLED_BY_ADMIN


def test_limits_fall_due_while_no_worker_is_up(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine:
        with rig_workers(tmp_path, 1):
            front = Reader(tmp_path).wait_serving()
        front.pump(lambda: not engine._group.is_open, "the group's end")
        keys = {
            front.submit(PROMPT, 5, deadline_ms=3000): FinishReason.DEADLINE_EXCEEDED,
            front.submit(PROMPT, 5, max_queue_ms=3000): FinishReason.QUEUE_TIME_EXCEEDED,
            front.submit(PROMPT, 5, time_budget_ms=300): FinishReason.TIME_LIMIT,
        }  # fmt: skip
        front.pump(lambda: all((key, 0) in front.finished for key in keys))
        assert {key: front.finished[key, 0].reason for key in keys} == keys
        front.close()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagecast_scheduler.core.config import SchedulerConfig
    from pagecast_scheduler.core.scheduler import Scheduler
    from pagecast_scheduler.engine import directory
    from pagecast_wire.codec import pack_u32
    from pagecast_wire.sampling import SamplingParams, StopRules

    monkeypatch.setattr(directory, "MAX_KEPT", 3)
    monkeypatch.setattr(directory, "MAX_ORPHANS", 2)
    book = directory.Directory(grace_us=10, retention_us=100)
    core = Scheduler(SchedulerConfig(16, 64, 256, 8, 256, 64, 4096), 1)
    for number in range(6):
        key = 1 << KEY_BITS | number
        identity = Identity("ada", f"r{number}", keep=True)
        rules = StopRules(max_output_tokens=5)
        submit = Submit(key, pack_u32([1, 2]), SamplingParams(), rules, bytes(32), identity=identity)
        core.submit(submit, number)
        request = core.request(key)
        assert request is not None
        book.open(submit, request, 0, number)
        for ended in book.leave(key, 50, number):
            entry = book.of_key(ended)
            assert entry is not None
            core.abort(ended, number)
            book.close(entry, core.outputs_of(request), number)
    names = [entry.name[1] for entry in book.all() if entry.request is None]
    assert names == ["r1", "r2", "r3"] and [entry.name[1] for entry in book.live()] == ["r4", "r5"]
    assert book.expire(54) == [1 << KEY_BITS | 4] and book.expire(200) == [1 << KEY_BITS | 4, 1 << KEY_BITS | 5]
    assert [entry.name[1] for entry in book.all() if entry.request is None] == []




@pytest.mark.parametrize("keep", [True, False])
def test_who_joins_gets_a_record_of_every_token(keep: bool) -> None:
    """Of the newest ones too, which no batch has told of yet; whether the request outlives its caller or not."""
    from types import SimpleNamespace

    from pagecast_scheduler.core.config import SchedulerConfig
    from pagecast_scheduler.core.scheduler import Scheduler
    from pagecast_scheduler.engine.directory import Directory
    from pagecast_scheduler.engine.intake import Intake
    from pagecast_wire.codec import pack_u32
    from pagecast_wire.result import StepResult
    from pagecast_wire.sampling import SamplingParams, StopRules

    core, sent = Scheduler(SchedulerConfig(16, 64, 256, 8, 256, 64, 4096), 1), list[Attached]()
    frontends: Any = SimpleNamespace(send=lambda slot, message: sent.append(message))
    epochs: Any = SimpleNamespace(core=core, step=0, is_braking=lambda now: False)
    intake = Intake(frontends, epochs, Directory(10, 100), None)
    core.start_epoch()

    def ask(slot: int, join: bool) -> None:
        identity = Identity("ada", "r", b"same", join=join, keep=keep)
        sampling = SamplingParams(num_logprobs=0, num_prompt_logprobs=0)
        submit = Submit(slot << KEY_BITS | 1, pack_u32([1, 2]), sampling, StopRules(9), bytes(32), identity=identity)
        front: Any = SimpleNamespace(slot=slot)
        intake.take(front, submit, 0)

    def step(number: int) -> None:
        core.plan_step(0)
        value, columns = bytes.fromhex("000080bf"), {"rows": 0, "starts": 1, "counts": 1, "tops": 0}
        prompt = {f"prompt_{name}": pack_u32([column]) for name, column in columns.items()} | {"prompt_logprobs": value}
        of_prompt = prompt if number == 1 else {}
        result = StepResult(1, number, 0, pack_u32([7]), bytes(1), logprob_rows=pack_u32([0]), logprobs=value, **of_prompt)
        core.apply_result(result, 0)

    ask(1, False)
    step(1)
    ask(2, True)
    intake.take_batches(0)
    step(2)
    ask(3, True)
    for told, have in zip(sent, (1, 2), strict=True):
        assert len(told.submit.history[0]) // 4 == have == len(told.logprobs)
        assert [record.offset for record in told.logprobs] == [*range(have)] and {r.key for r in told.logprobs} == {told.submit.key}
        assert [(part.key, part.start) for part in told.prompt_logprobs] == [(told.submit.key, 1)]
