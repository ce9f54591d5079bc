"""Lost, repeated, reordered, stale and hostile messages on both sockets."""

import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from e2e.engine_rig import RigFrontend, RigWorker, engine_thread, rig_workers

from pagecast_scheduler.engine.loop import Engine
from pagecast_wire import codec
from pagecast_wire.codec import pack_u32
from pagecast_wire.intake import Abort, Pause, StopAt
from pagecast_wire.plan import StartEpoch, StepPlan
from pagecast_wire.result import StepResult

Frames = list[bytes]


def _serve_exactly(run_dir: Path, lossy: Callable[[Frames], Frames], ranks: int = 1) -> tuple[list[RigWorker], int, int]:
    """Serve a few requests through the filter; the ranks, the epoch at the end and how many plans were sent again."""
    with engine_thread(run_dir, tensor_parallel_size=ranks) as engine, rig_workers(run_dir, ranks, lossy=lossy) as workers:
        frontend = RigFrontend(run_dir).wait_serving()
        keys = [frontend.submit(list(range(i + 1)), 12 + 2 * i, seed=i) for i in range(5)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        assert frontend.status is not None
        epoch = frontend.status.epoch
        frontend.close()
        return workers, epoch, engine._group.num_resent


def test_lost_plans_are_sent_again(tmp_path: Path) -> None:
    lost: set[int] = set()

    def lose_every_third_once(frames: Frames) -> Frames:
        kept = []
        for frame in frames:
            message = codec.decode(frame, "to_worker")
            if isinstance(message, StepPlan) and message.step % 3 == 0 and message.step not in lost:
                lost.add(message.step)
            else:
                kept.append(frame)
        return kept

    workers, epoch, num_resent = _serve_exactly(tmp_path, lose_every_third_once)
    assert len(lost) > 3 and num_resent >= len(lost)
    assert epoch == 1, "no loss of a plan costs an epoch"
    assert [plan.step for plan in workers[0].plans] == list(range(1, len(workers[0].plans) + 1))


def test_the_last_plan_is_sent_again_though_no_later_one_shows_the_gap(tmp_path: Path) -> None:
    seen: list[int] = []

    def lose_the_very_first(frames: Frames) -> Frames:
        plans = [f for f in frames if isinstance(codec.decode(f, "to_worker"), StepPlan)]
        if plans and not seen:
            seen.append(1)
            return [f for f in frames if f not in plans]
        return frames

    _, epoch, num_resent = _serve_exactly(tmp_path, lose_the_very_first)
    assert epoch == 1 and num_resent >= 1


def test_a_lost_start_of_epoch_is_sent_again(tmp_path: Path) -> None:
    lost: list[bytes] = []

    def lose_the_first_start(frames: Frames) -> Frames:
        starts = [f for f in frames if isinstance(codec.decode(f, "to_worker"), StartEpoch)]
        if starts and not lost:
            lost.extend(starts)
            return [f for f in frames if f not in starts]
        return frames

    _, epoch, _ = _serve_exactly(tmp_path, lose_the_first_start)
    assert lost and epoch == 1


def test_repeated_plans_change_nothing(tmp_path: Path) -> None:
    workers, epoch, _ = _serve_exactly(tmp_path, lambda frames: [f for frame in frames for f in (frame, frame, frame)], ranks=2)
    assert epoch == 1 and workers[0].num_duplicates > 10


def test_reordered_plans_are_applied_in_order(tmp_path: Path) -> None:
    """Holds frames back and lets them out shuffled, together with repeats of old ones."""
    rng = random.Random(7)
    old: list[bytes] = []
    waiting: list[bytes] = []

    def shuffle(frames: Frames) -> Frames:
        waiting.extend(frames)
        old.extend(frames)
        if len(waiting) < 2 and rng.random() < 0.5:
            return []
        out = [*waiting, *rng.sample(old, min(len(old), 2))]
        waiting.clear()
        rng.shuffle(out)
        return out

    workers, _, _ = _serve_exactly(tmp_path, shuffle)
    steps = [(plan.epoch, plan.step) for plan in workers[0].plans]
    assert steps == sorted(set(steps))


class _ResultFilter(RigWorker):
    """A rank whose results pass through `change` on their way out."""

    def __init__(self, run_dir: Path, change: Callable[[StepResult], list[StepResult]]) -> None:
        super().__init__(run_dir)
        self.change = change

    def send(self, message: msgspec.Struct) -> None:
        for each in self.change(message) if isinstance(message, StepResult) else [message]:
            super().send(each)


def _serve_through(run_dir: Path, change: Callable[[StepResult], list[StepResult]]) -> RigFrontend:
    worker = _ResultFilter(run_dir, change)
    with engine_thread(run_dir):
        worker.start()
        frontend = RigFrontend(run_dir).wait_serving()
        keys = [frontend.submit([i, 1], 25, seed=i) for i in range(4)]
        frontend.wait_finished(*keys)
        for key in keys:
            frontend.expect(key)
        assert not worker.stopped.is_set(), "the worker is not at fault and keeps its weights"
        worker.quit.set()
        worker.join()
        frontend.close()
        return frontend


def test_stale_and_repeated_results_are_ignored(tmp_path: Path) -> None:
    """Results of another epoch, of steps never planned, and of steps already applied come with every real one."""

    def add_stale(result: StepResult) -> list[StepResult]:
        wrong = msgspec.structs.replace(result, tokens=pack_u32([1] * (len(result.tokens) // 4)))
        stale = msgspec.structs.replace(wrong, epoch=result.epoch - 1)
        early = msgspec.structs.replace(wrong, epoch=result.epoch + 1)
        unplanned = msgspec.structs.replace(wrong, step=result.step + 1000)
        other_rank = msgspec.structs.replace(wrong, rank=1)
        return [stale, early, unplanned, other_rank, result, wrong]

    frontend = _serve_through(tmp_path, add_stale)
    assert frontend.status is not None and frontend.status.epoch == 1


@pytest.mark.parametrize("and_all_later", [False, True])
def test_a_lost_result_costs_an_epoch_and_no_token(tmp_path: Path, and_all_later: bool) -> None:
    """Where no later result shows the gap, the heartbeat does."""
    lost: list[int] = []

    def lose(result: StepResult) -> list[StepResult]:
        if result.epoch == 1 and (result.step == 15 or (and_all_later and result.step > 15)):
            lost.append(result.step)
            return []
        return [result]

    _serve_through(tmp_path, lose)
    assert lost


def test_a_result_that_makes_no_sense_costs_the_worker(tmp_path: Path) -> None:
    def cut(result: StepResult) -> list[StepResult]:
        return [msgspec.structs.replace(result, tokens=b"", flags=b"") if result.step == 5 else result]

    bad = _ResultFilter(tmp_path, cut)
    with engine_thread(tmp_path):
        bad.start()
        frontend = RigFrontend(tmp_path).wait_serving()
        key = frontend.submit([1, 2, 3], 30)
        frontend.pump(bad.stopped.is_set, "the worker is told to stop")
        good = RigWorker(tmp_path)
        good.start()
        frontend.wait_finished(key)
        frontend.expect(key)
        good.quit.set()
        good.join()
        frontend.close()


def _garbage() -> list[list[bytes]]:
    rng = random.Random(3)
    good = codec.encode(Abort((1,)))
    deep = b"\x91" * 100_000 + b"\xc0"
    return [
        [pickle.dumps({"type": "submit", "key": 1})],
        [b""], [b"\xc1"], [rng.randbytes(1000)], [good[:-1]], [good + b"\x00"], [deep],
        [msgspec.msgpack.encode({"type": "abort", "keys": [1], "extra": 1})],
        [msgspec.msgpack.encode({"type": "no such message"})],
        [msgspec.msgpack.encode({"type": "worker_hello", "wire_version": "x", "wire_digest": 5})],
        [good, b"\xc1"], [b"", good], [b"\xdf\xff\xff\xff\xff"],
    ]  # fmt: skip


def _throw(path: str, garbage: list[list[bytes]]) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{path}")
    for frames in garbage:
        socket.send_multipart(frames)
    socket.close()
    context.term()


def _dropped(engine: Engine) -> int:
    return engine._num_dropped()


def test_garbage_on_both_sockets_is_dropped_and_counted(tmp_path: Path) -> None:
    with engine_thread(tmp_path) as engine, rig_workers(tmp_path, 1):
        frontend = RigFrontend(tmp_path).wait_serving()
        key = frontend.submit([1] * 20, 200)
        garbage = _garbage()
        throwers = [threading.Thread(target=_throw, args=(f"{tmp_path}/{name}.ipc", garbage)) for name in ("frontends", "workers")]
        for thrower in throwers:
            thrower.start()
        frontend.wait_finished(key)
        for thrower in throwers:
            thrower.join()
        frontend.pump(lambda: _dropped(engine) >= 2 * len(garbage), "every bad message counted")
        frontend.expect(key)
        assert frontend.status is not None and frontend.status.epoch == 1
        frontend.close()


def test_odd_values_of_a_known_front_end_are_answered(tmp_path: Path) -> None:
    with engine_thread(tmp_path), rig_workers(tmp_path, 1):
        frontend = RigFrontend(tmp_path).wait_serving()
        canary = frontend.submit([1] * 20, 100)
        base = dict.fromkeys(("cache_namespace", "num_sequences", "priority", "history", "prompt"))
        changes: list[dict[str, Any]] = [
            {"cache_namespace": b"x"}, {"num_sequences": 0}, {"num_sequences": 2**40}, {"priority": 99}, {"priority": -1},
            {"history": (b"", b"")}, {"history": (b"abc",)}, {"prompt": b""}, {"prompt": b"abc"},
        ]  # fmt: skip
        assert {name for change in changes for name in change} == set(base)
        keys = []
        for change in changes:
            frontend._counter += 1
            key = canary + frontend._counter
            frontend.send(msgspec.structs.replace(frontend.submits[canary], key=key, **change))
            keys.append(key)
        frontend.send(StopAt(canary, 77, 3))
        frontend.send(StopAt(canary + 500, 0, 3))
        frontend.send(Pause(canary + 500, True))
        frontend.send(Abort((canary + 500,)))
        frontend.wait_finished(canary, *keys)
        frontend.expect(canary)
        assert set(frontend.rejected) == set(keys)
        frontend.close()
