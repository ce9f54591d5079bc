"""Ranks that compute together meet through the scheduler: all or none, what differs is named, and a new process ends the old group."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import zmq
from e2e.engine_rig import LIVENESS_S, engine_thread

from pagecast_scheduler.engine.recovery import SECOND
from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION, decode, encode
from pagecast_wire.intake import ModelFacts
from pagecast_wire.plan import GroupFormed, StartEpoch, StopWorker
from pagecast_wire.result import GroupJoin, WorkerHello

FACTS = ModelFacts("m", "a", "d1", 100, 50, (0,), "float32", 1, 1, 1, 8, 0)


class Peer:
    """A rank that says only what a test tells it to. It claims another PID namespace, so it is asked to stop instead of killed."""

    def __init__(self, context: "zmq.Context[Any]", run_dir: Path, rank: int, world_size: int = 2, **join: Any) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IDENTITY, uuid4().bytes)
        self.socket.connect(f"ipc://{run_dir}/workers.ipc")
        address = f"10.0.0.{rank}:7" if rank == 0 else ""
        join = {"world_size": world_size, "model_digest": "d1", "config_digest": "c1", "address": address} | join
        self.join = GroupJoin(
            **{"wire_version": WIRE_VERSION, "wire_digest": WIRE_DIGEST, "incarnation": uuid4().hex, "pid": os.getpid(),
               "pid_namespace": 0, "rank": rank} | join
        )
        self.send(self.join)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message))

    def hello(self, group: str) -> None:
        join = self.join
        self.send(
            WorkerHello(
                join.wire_version, join.wire_digest, join.incarnation, join.pid, 0, join.rank, join.world_size, 0, FACTS, "c1", 10, 16,
                group,
            )
        )

    def receive(self) -> Any:
        assert self.socket.poll(LIVENESS_S * 1000), f"rank {self.join.rank} heard nothing"
        return decode(self.socket.recv(), "to_worker")

    def hears_nothing(self) -> bool:
        return not self.socket.poll(200)


@contextmanager
def peers() -> Iterator["zmq.Context[Any]"]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def formed(*group: Peer) -> GroupFormed:
    """What each of them hears, which is the same."""
    (message,) = {peer.receive() for peer in group}
    assert isinstance(message, GroupFormed)
    return message


def test_all_ranks_hear_of_one_group_and_open_an_epoch(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2), peers() as context:
        one = Peer(context, tmp_path, 1)
        assert one.hears_nothing()
        zero = Peer(context, tmp_path, 0)
        group = formed(zero, one)
        assert group.address == "10.0.0.0:7"
        one.send(one.join)  # as if the answer had been lost
        assert one.receive() == group
        for peer in (zero, one):
            peer.hello(group.group)
        assert isinstance(zero.receive(), StartEpoch) and isinstance(one.receive(), StartEpoch)


def test_what_differs_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2) as engine, peers() as context:
        zero, end = Peer(context, tmp_path, 0), time.monotonic() + LIVENESS_S
        while 0 not in engine._group._gathering.members:
            assert time.monotonic() < end and zero.join
            time.sleep(0.02)
        for wrong, words in (
            ({"model_digest": "d2"}, ("model digest d2", "rank 0 reported d1")),
            ({"config_digest": "c2"}, ("config digest c2", "rank 0 reported c1")),
            ({"world_size": 3}, ("tensor_parallel_size 3", "has 2")),
            ({"wire_digest": "feed"}, ("wire digest feed", WIRE_DIGEST)),
        ):
            stop = Peer(context, tmp_path, 1, **wrong).receive()
            assert isinstance(stop, StopWorker) and all(word in stop.reason for word in ("refused", *words))
        heard = engine._group._silent_since
        while heard[0] <= heard[1]:
            assert time.monotonic() < end
            zero.send(zero.join)
            time.sleep(0.02)
        late = heard[1] + int(engine._group.config.rank_timeout_s * SECOND) + 1  # for rank 1, not for rank 0, of which more was heard
        missing = engine._group.missing(0, late)
        assert missing is not None and "no worker for rank 1 (refused: wire digest feed" in missing and "rank 0" not in missing


def test_a_rank_that_waits_is_not_the_missing_one(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2, rank_timeout_s=4.0) as engine, peers() as context:
        zero, end = Peer(context, tmp_path, 0), time.monotonic() + LIVENESS_S
        while not engine.reason and time.monotonic() < end:
            zero.send(zero.join)
            time.sleep(0.1)
        assert "rank 1" in engine.reason and "rank 0" not in engine.reason


def test_a_rank_that_starts_again_ends_the_group_that_it_left(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2), peers() as context:
        zero, one = Peer(context, tmp_path, 0), Peer(context, tmp_path, 1)
        old = formed(zero, one)
        zero.hello(old.group)
        again = Peer(context, tmp_path, 1)
        assert zero.receive() == StopWorker() and one.receive() == StopWorker()
        zero.hello(old.group)  # it had not heard yet
        assert zero.receive() == StopWorker()
        new_zero = Peer(context, tmp_path, 0)
        group = formed(new_zero, again)
        assert group.group != old.group
        for peer in (new_zero, again):
            peer.hello(group.group)
            assert peer is new_zero or isinstance(peer.receive(), StartEpoch)


def test_a_rank_of_a_group_that_this_scheduler_never_saw_cannot_join_those_that_start(tmp_path: Path) -> None:
    with engine_thread(tmp_path, tensor_parallel_size=2), peers() as context:
        fresh = Peer(context, tmp_path, 1)
        assert fresh.hears_nothing()
        survivor = Peer(context, tmp_path, 0, world_size=5)  # its join of long ago; what matters is the hello
        assert isinstance(survivor.receive(), StopWorker)
        old = Peer.__new__(Peer)
        old.socket, old.join = survivor.socket, msgspec.structs.replace(fresh.join, rank=0, incarnation=uuid4().hex)
        old.hello("an older group")
        assert old.receive() == StopWorker()


def test_survivors_are_adopted_by_a_new_scheduler_as_the_group_they_are(tmp_path: Path) -> None:
    with peers() as context:
        with engine_thread(tmp_path, tensor_parallel_size=2):
            zero, one = Peer(context, tmp_path, 0), Peer(context, tmp_path, 1)
            group = formed(zero, one)
        with engine_thread(tmp_path, tensor_parallel_size=2):
            end = time.monotonic() + LIVENESS_S
            while not (zero.socket.poll(500) and one.socket.poll(500)):  # what was sent to the old socket's end is lost
                assert time.monotonic() < end
                for peer in (zero, one):
                    peer.hello(group.group)
            assert isinstance(zero.receive(), StartEpoch) and isinstance(one.receive(), StartEpoch)
