"""The scheduler's end of the worker link, played by a test, and a real worker process that dials in."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pagecast_wire.codec import decode, encode, pack_u32
from pagecast_wire.intake import LoadProgress
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.result import Heartbeat, WorkerHello
from pagecast_wire.sampling import SamplingParams

WAIT_S = 30.0
START = (
    "import json, sys; from pagecast_worker.config import WorkerConfig; from pagecast_worker.main import run; "
    "sys.exit(run(WorkerConfig(**json.loads(sys.argv[1]))))"
)


def worker_argv(run_dir: Path, **options: Any) -> list[str]:
    config = {"run_dir": str(run_dir), "model": "oracle", "executor": "oracle", "num_blocks": 64, "max_model_len": 256} | options
    return [sys.executable, "-c", START, json.dumps(config)]


def start_worker(run_dir: Path, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(worker_argv(run_dir, **options), stderr=subprocess.PIPE)


class SchedulerSocket:
    """A ROUTER on RUN_DIR/workers.ipc; heartbeats are kept apart from everything else."""

    def __init__(self, run_dir: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(f"ipc://{run_dir}/workers.ipc")
        self.heartbeats: list[Heartbeat] = []
        self.heartbeat_peers: set[bytes] = set()
        self.peers: dict[bytes, WorkerHello] = {}

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def receive(self, wait_s: float = WAIT_S) -> tuple[bytes, Any]:
        """The next message that is no heartbeat. Fails after wait_s."""
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(left * 1000) + 1):
                peer, data = self.socket.recv_multipart()
                message = decode(data, "from_worker")
                if not isinstance(message, Heartbeat):
                    return peer, message
                self.heartbeats.append(message)
                self.heartbeat_peers.add(peer)
        raise AssertionError("no message in time")

    def expect(self, kind: type[msgspec.Struct]) -> Any:
        """The next message, load progress apart, which must be of this kind."""
        while isinstance(pair := self.receive(), tuple) and isinstance(pair[1], LoadProgress) and kind is not LoadProgress:
            pass
        assert isinstance(pair[1], kind), pair[1]
        if isinstance(pair[1], WorkerHello):
            self.peers[pair[0]] = pair[1]
        return pair[1]

    def heartbeat(self, epoch: int, step: int) -> Heartbeat:
        """The first heartbeat of such a state."""
        deadline = time.monotonic() + WAIT_S
        while not any((beat.epoch, beat.last_step) == (epoch, step) for beat in self.heartbeats):
            left = deadline - time.monotonic()
            assert left > 0 and self.socket.poll(round(left * 1000) + 1), "no heartbeat in time"
            peer, data = self.socket.recv_multipart()
            message = decode(data, "from_worker")
            assert isinstance(message, Heartbeat), message
            self.heartbeats.append(message)
            self.heartbeat_peers.add(peer)
        return self.heartbeats[-1]

    def send(self, message: msgspec.Struct, peers: Sequence[bytes] | None = None) -> None:
        for peer in self.peers if peers is None else peers:
            self.socket.send_multipart([peer, encode(message)])


def start_epoch(epoch: int) -> StartEpoch:
    return StartEpoch(epoch=epoch, num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=2048)


def prefill(epoch: int, step: int, prompt: Sequence[int], row: int = 0, block: int = 1) -> StepPlan:
    """Admission of a prompt of up to 64 tokens with room for 128 in consecutive blocks, and one chunk over all of it."""
    admission = Admission(
        row=row, tokens=pack_u32(prompt), num_prompt_tokens=len(prompt), blocks=pack_u32(range(block, block + 8)),
        num_computed_tokens=0, max_tokens=128, min_tokens=0, stop_token_ids=b"", sampling=SamplingParams(),
    )
    return StepPlan(
        epoch=epoch, step=step, admissions=(admission,), chunk_rows=pack_u32([row]), chunk_starts=pack_u32([0]),
        chunk_lengths=pack_u32([len(prompt)]),
    )
