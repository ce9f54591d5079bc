"""Requests that several front ends, or none, were reading when the scheduler was lost: what the next one makes of what it is brought."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from e2e.engine_rig import engine_thread, rig_workers
from e2e.test_engine_readers import PROMPT, Reader

from pagecast_scheduler.engine import loop
from pagecast_scheduler.engine.directory import Directory
from pagecast_scheduler.engine.recovery import SECOND
from pagecast_scheduler.engine.returning import in_order_of_return
from pagecast_wire.codec import pack_u32
from pagecast_wire.control import Attach, Attached, EarlierLogprobs, Kept, Leave
from pagecast_wire.intake import KEY_BITS, Finished, FrontendBatch, Identity, Pause, Ready, RejectReason, Submit, TokenLogprobs, Usage
from pagecast_wire.sampling import FinishReason, SamplingParams, StopRules
from pagecast_worker.oracle import oracle_tokens


class Returning(Reader):
    """Brings back what a test says, once the next scheduler asks."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.brings: list[msgspec.Struct] | None = None
        self.is_deaf = False

    def forget(self, key: int, tokens: list[int]) -> None:
        """Of what the lost scheduler told, these tokens are all that arrived."""
        self.is_deaf, self.tokens[key, 0] = True, tokens

    def _take_batch(self, batch: FrontendBatch) -> None:
        if not self.is_deaf:
            super()._take_batch(batch)

    def _bring_back(self) -> None:
        self._returning = self.is_deaf = False
        for message in self.brings or []:
            self.send(message)
        self.num_resubmits += 1
        if self.brings is not None:
            self.send(Ready())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test speaks for its front ends one after the other; a scheduler that waits for them gives a slow machine time."""
    monkeypatch.setattr(loop, "HOLD", 60 * SECOND)


def expected(n: int, seed: int = 9) -> list[int]:
    return oracle_tokens(PROMPT, n, seed=seed)


def kept(key: int, request_id: str, n: int, left_ms: int = 60_000) -> Kept:
    identity = Identity("ada", request_id, b"digest", b"view", keep=True)
    rules = StopRules(max_output_tokens=n)
    submit = Submit(key, pack_u32(PROMPT), SamplingParams(seed=9), rules, bytes(32), history=(pack_u32(expected(n)),), identity=identity)
    end = Finished(key, 0, FinishReason.LENGTH, Usage(len(PROMPT), 0, n, 0, 0, 0, 0, 0, 0))
    return Kept(Attached(submit, 2, 5000, (end,), (TokenLogprobs(key, 0, 0, -1.5),)), left_ms)


def test_every_reader_gets_the_longest_history_and_no_token_is_drawn_twice(tmp_path: Path) -> None:
    with rig_workers(tmp_path, 1) as (worker,):
        with engine_thread(tmp_path):
            behind, ahead = Returning(tmp_path).wait_serving(), Returning(tmp_path).wait_serving()
            worker.hold_after = 60
            key = behind.begin("r", 400)
            behind.pump(lambda: key in behind.accepted)
            joined = ahead.attach("r")
            ahead.wait_attached(joined)
            behind.pump(lambda: len(behind.tokens.get((key, 0), [])) >= 30, "tokens")
        back = msgspec.structs.replace(behind.submits[key], identity=msgspec.structs.replace(behind.submits[key].identity, join=True))
        behind.forget(key, expected(400)[:10])
        ahead.forget(joined, expected(400)[:30])
        behind.brings = [Pause(key, False), msgspec.structs.replace(back, history=(pack_u32(behind.tokens[key, 0]),))]
        records = tuple(TokenLogprobs(joined, 0, at, -0.5) for at in range(30))
        ahead.brings = [
            EarlierLogprobs(joined, records), msgspec.structs.replace(back, key=joined, history=(pack_u32(ahead.tokens[joined, 0]),))
        ]  # fmt: skip
        worker.hold_after = None
        with engine_thread(tmp_path):
            ahead.pump(lambda: ahead.num_resubmits == 1, "what the second brings")
            behind.pump(lambda: key in behind.attached, "told of what it lacks")
            assert len(behind.attached[key].submit.history[0]) == 4 * 30
            assert [record.logprob for record in behind.attached[key].logprobs] == [-0.5] * 30
            ahead.wait_finished(joined)
            behind.wait_finished(key)
            for front, own in ((behind, key), (ahead, joined)):
                assert front.tokens[own, 0] == expected(400)
            admitted = [a.tokens for plan in worker.plans if plan.epoch == worker.starts[-1].epoch for a in plan.admissions]
            assert admitted.count(pack_u32([*PROMPT, *expected(400)[:30]])) == 1
            behind.close()
            ahead.close()


def test_a_request_that_is_only_kept_goes_on_and_what_ended_can_still_be_read(tmp_path: Path) -> None:
    with rig_workers(tmp_path, 1) as (worker,):
        with engine_thread(tmp_path):
            keeper, other = Returning(tmp_path).wait_serving(), Returning(tmp_path).wait_serving()
            worker.hold_after = 40
            key = keeper.begin("r", 300)
            keeper.pump(lambda: key in keeper.accepted)
            keeper.send(Leave((key,), 60_000, keeps=True))
            keeper.pump(lambda: len(keeper.tokens.get((key, 0), [])) >= 10, "it is told on although nobody reads")
        have = keeper.tokens[key, 0]
        keeper.forget(key, have)
        identity = msgspec.structs.replace(keeper.submits[key].identity, join=True)
        records = tuple(TokenLogprobs(key, 0, at, -0.5) for at in range(len(have)))
        ended, over = kept(key + 10, "ended", 5), kept(key + 11, "over", 5, left_ms=0)
        keeper.brings = [
            ended, over, EarlierLogprobs(key, records), EarlierLogprobs(key + 12, records),
            msgspec.structs.replace(keeper.submits[key], history=(pack_u32(have),), identity=identity), Leave((key,), 60_000, keeps=True),
        ]  # fmt: skip
        other.brings = []
        worker.hold_after = None
        with engine_thread(tmp_path):
            keeper.pump(lambda: keeper.num_resubmits == 1)
            other.pump(lambda: other.num_resubmits == 1)
            live, late, gone = other.attach("r"), other.attach("ended"), other.attach("over")
            other.wait_attached(live)
            assert [record.logprob for record in other.attached[live].logprobs[: len(have)]] == [-0.5] * len(have)
            other.wait_attached(late)
            assert other.attached[late].logprobs == (TokenLogprobs(late, 0, 0, -1.5),) and other.attached[late].queue_position == 2
            assert other.tokens[late, 0] == expected(5) and other.finished[late, 0].reason is FinishReason.LENGTH
            other.pump(lambda: gone in other.rejected)
            assert other.rejected[gone].reason is RejectReason.REQUEST_UNKNOWN
            other.wait_finished(live)
            keeper.wait_finished(key)
            assert other.tokens[live, 0] == keeper.tokens[key, 0] == expected(300)
            again = keeper.attach("r")
            keeper.wait_attached(again)
            assert keeper.tokens[again, 0] == expected(300)
            keeper.close()
            other.close()


def test_a_keeper_is_no_reader(tmp_path: Path) -> None:
    """It neither holds a request up nor keeps it alive, and a second word of it ends the keeping alone."""
    with rig_workers(tmp_path, 1) as (worker,), engine_thread(tmp_path) as engine:
        keeper, other = Reader(tmp_path).wait_serving(), Reader(tmp_path).wait_serving()
        worker.hold_results.set()
        key, short = keeper.begin("r", 300), keeper.begin("short", 300)
        keeper.pump(lambda: {key, short} <= set(keeper.accepted))
        keeper.send(Leave((key,), 60_000, keeps=True))
        keeper.send(Leave((short,), 1, keeps=True))
        keeper.pump(lambda: (short, 0) in keeper.finished, "its time ran out")
        assert keeper.finished[short, 0].reason is FinishReason.CANCELLED
        joined = other.attach("r")
        other.wait_attached(joined)
        other.send(Pause(joined, True))
        core = engine._epochs.core
        assert core is not None
        other.pump(lambda: (request := core.request(key)) is not None and request.paused, "one reader, who does not read")
        keeper.send(Leave((key,), 60_000))  # it forgets the request
        other.send(Pause(joined, False))
        worker.hold_results.clear()
        other.wait_finished(joined)
        assert other.tokens[joined, 0] == expected(300) and (key, 0) not in keeper.finished
        alone = keeper.begin("alone", 300)
        keeper.pump(lambda: alone in keeper.accepted)
        keeper.send(Leave((alone,), 60_000, keeps=True))
        joined = other.attach("alone")
        other.wait_attached(joined)
        other.send(Leave((joined,), 0))
        keeper.pump(lambda: (alone, 0) in keeper.finished, "the last reader has gone for good")
        assert keeper.finished[alone, 0].reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        keeper.close()
        other.close()


@pytest.mark.parametrize("draining", [True, False])
def test_accepted_requests_are_not_refused_when_they_come_back(tmp_path: Path, draining: bool) -> None:
    """Also those that have no token yet, more of them than may be queued, and while the next scheduler is leaving."""
    with rig_workers(tmp_path, 1) as (worker,):
        with engine_thread(tmp_path, max_queued_requests=4, max_num_seqs=2):
            front = Returning(tmp_path).wait_serving()
            worker.hold_results.set()
            keys = [front.begin("q0", 20), front.begin("q1", 20)]
            front.pump(lambda: set(keys) <= set(front.accepted))
            keys += [front.begin(f"q{i}", 20) for i in range(2, 6)]
            front.pump(lambda: set(keys) <= {*front.accepted, *front.rejected})
        accepted = [key for key in keys if key in front.accepted]
        front.accepted.clear()
        front.brings = [msgspec.structs.replace(front.submits[key], history=(b"",)) for key in accepted]
        worker.hold_results.clear()
        with engine_thread(tmp_path, max_queued_requests=len(accepted) - 1, max_num_seqs=2) as engine:
            if draining:
                engine._intake.is_draining = True
            front.pump(lambda: front.num_resubmits == 1)
            front.wait_finished(*accepted)
            assert not set(front.rejected) & set(accepted)
            for key in accepted:
                front.expect(key)
            front.close()


def test_histories_of_different_sequences_are_put_together_before_anyone_reads() -> None:
    def submit(key: int, request_id: str, *histories: bytes, digest: bytes = b"d") -> Any:
        identity = Identity("ada", request_id, digest)
        return (f"front of {key}", Submit(key, b"1234", SamplingParams(), StopRules(8), bytes(32), history=histories, identity=identity))

    pause: Any = ("front of 1", Pause(1, True))
    records = EarlierLogprobs(2, (TokenLogprobs(2, 1, 0, -1.0),))
    brought = [pause, submit(1, "r", b"aaaa", b""), submit(2, "r", b"", b"bbbb"), submit(3, "r"), submit(4, ""), submit(5, "", b"cccc")]
    brought += [("front of 2", records), submit(6, "r", b"dddddddd", b"", digest=b"e"), submit(7, "s", b"eeee"), submit(8, "s", b"")]
    ordered: list[Any] = [message for _, message in in_order_of_return(brought)]
    told = [(m.key, m.history) for m in ordered if isinstance(m, Submit)]
    whole = (b"aaaa", b"bbbb")
    assert told == [(1, whole), (4, ()), (5, (b"cccc",)), (6, (b"dddddddd", b"")), (7, (b"eeee",)), (2, whole), (3, whole), (8, (b"eeee",))]
    assert [type(m) for m in ordered[5:]] == [EarlierLogprobs, Submit, Submit, Submit, Attach, Pause]
    assert in_order_of_return(brought)[5][0] == "front of 1" == in_order_of_return(brought)[9][0]
    assert ordered[5] == EarlierLogprobs(1, records.records) and ordered[9] == Attach(1, "ada", "r")


def test_what_several_front_ends_bring_back_is_forgotten_each_in_its_time() -> None:
    book = Directory(1, 60_000_000)
    lefts = {"a": 50_000, "b": 60_000, "c": 20_000, "d": 55_000, "e": 60_000}  # two front ends', each in its own order
    for number, (name, left_ms) in enumerate(lefts.items()):
        book.restore(kept(number + 1 << KEY_BITS, name, 5, left_ms=left_ms), 0)
    for now_ms in (19_999, 20_000, 50_000, 55_000, 60_000):
        book.expire(1000 * now_ms)
        assert {entry.name[1] for entry in book.all()} == {name for name, left_ms in lefts.items() if left_ms > now_ms}
    brought: list[Any] = [("front", kept(1, "x", 5, left_ms=7)), ("front", Pause(2, True)), ("other", kept(3, "y", 5, left_ms=3))]
    assert in_order_of_return(brought) == [brought[2], brought[0], brought[1]]


def test_who_asked_for_an_ended_request_as_the_scheduler_died_finds_it(tmp_path: Path) -> None:
    """The question comes back before what is kept: front ends bring their open calls first."""
    with rig_workers(tmp_path, 1):
        with engine_thread(tmp_path):
            front = Returning(tmp_path).wait_serving()
            key = front.slot << KEY_BITS | 77
            front.brings = [Attach(key, "ada", "ended"), kept(key + 1, "ended", 5)]
        with engine_thread(tmp_path):
            front.wait_attached(key)
            assert front.tokens[key, 0] == expected(5)
            front.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_ended_requests_with_one_id_the_latest_is_kept(order: tuple[int, int]) -> None:
    """An id may be used again once its request has ended; each front end brings back the one that it has seen."""
    earlier, later = kept(1 << KEY_BITS | 7, "r", 5, left_ms=20_000), kept(2 << KEY_BITS | 9, "r", 8, left_ms=50_000)
    book = Directory(1, 60_000_000)
    for at in order:
        book.restore((earlier, later)[at], 0)
    entry = book.find("ada", "r")
    assert entry is not None and entry.tokens == (pack_u32(expected(8)),) and book.all() == [entry]
    assert book.expire(30_000_000) == [] and book.find("ada", "r") is entry
    book.expire(50_000_000)
    assert book.all() == []
