"""Peers of the scheduler for tests over real sockets: a front end, worker ranks in threads and in processes, the engine in both ways.

The ranks run the oracle, so every token that arrives can be compared with what it had to be.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import zmq

from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.epochs import Record
from pagecast_scheduler.engine.loop import Engine
from pagecast_scheduler.engine.processes import own_pid_namespace
from pagecast_wire import codec, log_lines
from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION, pack_u32, view_u32, view_u64
from pagecast_wire.intake import (
    KEY_BITS,
    Abort,
    EngineStatus,
    Finished,
    FrontendBatch,
    FrontendHello,
    FrontendPing,
    FrontendRefused,
    FrontendWelcome,
    HelloWanted,
    LoadProgress,
    Ready,
    Rejected,
    ServingState,
    Submit,
)
from pagecast_wire.plan import PrepareConstraint, StartEpoch, StepPlan, StopWorker
from pagecast_wire.result import ConstraintPrepared, Heartbeat, PlanGap, WorkerFault, WorkerHello
from pagecast_wire.sampling import Constraint, SamplingParams, StopRules
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import PlanError
from pagecast_worker.link import PlanOrder, Verdict
from pagecast_worker.oracle import OracleExecutor, oracle_tokens

LIVENESS_S = 60.0
"""How long anything may take before a test fails: a bound on being stuck, not a promise of speed."""

log_lines.configure("json", "error")

Filter = Callable[[list[bytes]], list[bytes]]


class RigFrontend:
    """A front end without gRPC. Keeps every token and checks the offsets of each batch; brings its requests back when asked.

    Whichever of a test's front ends is pumped, all of them ping: what else a test waits for makes none of them fall silent.
    """

    open: ClassVar[set["RigFrontend"]] = set()

    def __init__(self, run_dir: Path, pid: int | None = None) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.set(zmq.IDENTITY, uuid4().bytes)
        self.socket.connect(f"ipc://{run_dir}/frontends.ipc")
        self.incarnation = uuid4().hex
        self.pid = pid
        self.slot = -1
        self.welcome: FrontendWelcome | None = None
        self.refused: FrontendRefused | None = None
        self.status: EngineStatus | None = None
        self.states: list[ServingState] = []
        self.load: dict[tuple[int, str], LoadProgress] = {}
        self.submits: dict[int, Submit] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.accepted: list[int] = []
        self.rejected: dict[int, Rejected] = {}
        self.num_resubmits = 0
        self._counter = 0
        self._returning = False
        self._next_ping = 0.0
        self.open.add(self)
        self.hello()

    def hello(self, **changes: Any) -> None:
        namespace = own_pid_namespace() if self.pid is not None else 0
        hello = FrontendHello(WIRE_VERSION, WIRE_DIGEST, self.incarnation, self.pid or 0, namespace, self.slot)
        self.send(msgspec.structs.replace(hello, **changes))

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(codec.encode(message))

    def submit(self, prompt: list[int], n: int, seed: int = 0, constraint: Constraint | None = None, **fields: Any) -> int:
        """Send a request for n tokens that no stop id can shorten; returns its key."""
        self._counter += 1
        key = self.slot << KEY_BITS | self._counter
        self.submits[key] = Submit(
            key=key, prompt=pack_u32(prompt), sampling=SamplingParams(seed=seed, constraint=constraint),
            stop=StopRules(max_output_tokens=n),
            cache_namespace=bytes(range(32)), **fields,
        )  # fmt: skip
        self.send(self.submits[key])
        return key

    def abort(self, *keys: int) -> None:
        self.send(Abort(keys))

    def pump(self, until: Callable[[], bool], what: str = "") -> None:
        """Take messages, and ping, until the condition holds."""
        end = time.monotonic() + LIVENESS_S
        while not until():
            assert time.monotonic() < end, f"nothing for {LIVENESS_S} s: {what or until}; status {self.status}"
            for each in self.open:
                each._ping()
            if self.socket.poll(200):
                self._take(codec.decode(self.socket.recv(), "to_frontend"))

    def _ping(self) -> None:
        now = time.monotonic()
        if self.slot > 0 and now >= self._next_ping:
            self._next_ping = now + 1.0
            self.send(FrontendPing(self.slot))

    def wait_serving(self) -> "RigFrontend":
        self.pump(lambda: self.status is not None and self.status.state == ServingState.SERVING and self.welcome is not None, "SERVING")
        return self

    def wait_finished(self, *keys: int) -> None:
        self.pump(lambda: all((key, 0) in self.finished or key in self.rejected for key in keys), "finished")

    def _take(self, message: Any) -> None:
        match message:
            case FrontendBatch():
                self._take_batch(message)
            case EngineStatus():
                self.status = message
                self.load |= {(p.rank, p.phase): p for p in message.load}
                if not self.states or self.states[-1] != message.state:
                    self.states.append(message.state)
            case FrontendWelcome():
                self.welcome, self.slot = message, message.slot
                if self._returning:
                    self._bring_back()
            case FrontendRefused():
                self.refused = message
            case HelloWanted():
                self._returning = self.slot > 0
                self.hello()

    def _take_batch(self, batch: FrontendBatch) -> None:
        self.accepted += [a.key for a in batch.accepted]
        self.rejected |= {r.key: r for r in batch.rejected}
        tokens, at = view_u32(batch.tokens).tolist(), 0
        columns = (view_u64(batch.keys), view_u32(batch.sequences), view_u32(batch.offsets), view_u32(batch.counts))
        for key, sequence, offset, count in zip(*(column.tolist() for column in columns), strict=True):
            mine = self.tokens.setdefault((key, sequence), [])
            assert offset == len(mine), f"offset {offset} after {len(mine)} tokens"
            assert (key, sequence) not in self.finished
            mine += tokens[at : at + count]
            at += count
        for finished in batch.finished:
            assert (finished.key, finished.sequence) not in self.finished
            self.finished[finished.key, finished.sequence] = finished

    def _bring_back(self) -> None:
        self._returning = False
        for key, submit in self.submits.items():
            if (key, 0) not in self.finished and key not in self.rejected:
                history = (pack_u32(self.tokens.get((key, 0), [])),)
                self.send(msgspec.structs.replace(submit, history=history))
                self.num_resubmits += 1
        self.send(Ready())

    def expect(self, key: int) -> None:
        """The tokens of this finished request are the oracle's."""
        submit = self.submits[key]
        sampling, prompt = submit.sampling, view_u32(submit.prompt).tolist()
        constrained = sampling.constraint is not None
        expected = oracle_tokens(prompt, submit.stop.max_output_tokens, seed=sampling.seed, constrained=constrained)
        assert self.tokens[key, 0] == expected

    def close(self) -> None:
        self.open.discard(self)
        self.socket.close()
        self.context.term()


class RigWorker(threading.Thread):
    """One rank in a thread of the test: the oracle behind a socket whose incoming messages a filter may lose, repeat or reorder.

    Its pid namespace is made up, so the scheduler asks it to stop where it would kill a process.
    """

    def __init__(
        self, run_dir: Path, rank: int = 0, world_size: int = 1, num_blocks: int = 512, lossy: Filter | None = None, step_us: int = 0,
        **hello: Any,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.config = WorkerConfig(
            str(run_dir), "oracle", rank, world_size, "oracle", num_blocks=num_blocks, max_model_len=2048, oracle_step_us=step_us
        )
        self.lossy = lossy or (lambda frames: frames)
        self.hello_changes = hello
        self.rank = rank
        self.incarnation = uuid4().hex
        self.stopped = threading.Event()  # the scheduler asked it to stop
        self.quit = threading.Event()  # the test did
        self.plans: list[StepPlan] = []
        self.starts: list[StartEpoch] = []
        self.faults: list[str] = []
        self.num_duplicates = 0
        self.hold_results = threading.Event()
        self.hold_after: int | None = None  # results of later steps are held too
        self.silent = threading.Event()

    def run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 200)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.set(zmq.IDENTITY, uuid4().bytes)
        self.socket.connect(self.config.workers_endpoint)
        self.executor = OracleExecutor(self.config)
        facts, num_blocks = self.executor.load(self.send)
        self.order, self.done = PlanOrder(), 0
        self.hello = WorkerHello(
            WIRE_VERSION, WIRE_DIGEST, self.incarnation, os.getpid(), 0, self.rank, self.config.tensor_parallel_size, 0, facts,
            self.config.digest(), num_blocks, self.config.block_size,
        )  # fmt: skip
        self.hello = msgspec.structs.replace(self.hello, **self.hello_changes)
        self.send(self.hello)
        next_beat = 0.0
        while not (self.stopped.is_set() or self.quit.is_set()):
            if not self.silent.is_set() and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + 0.3
                self.send(Heartbeat(self.rank, self.incarnation, self.order.epoch, self.done))
            frames = []
            while self.socket.poll(20 if not frames else 0):
                frames.append(self.socket.recv())
            try:
                for frame in self.lossy(frames):
                    self._take(codec.decode(frame, "to_worker"))
                self._collect()
            except PlanError as error:
                self.faults.append(str(error))
                self.send(WorkerFault(self.rank, self.order.epoch, self.order.last_step, "protocol", str(error)))
        self.socket.close()
        context.term()

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(codec.encode(message))

    def _take(self, message: Any) -> None:
        match message:
            case StepPlan():
                verdict = self.order.judge(message.epoch, message.step)
                if verdict is Verdict.APPLY:
                    self.plans.append(message)
                    self.executor.submit(message)
                elif verdict is Verdict.GAP:
                    self.send(PlanGap(self.order.epoch, self.rank, self.order.last_step))
                elif verdict is Verdict.DUPLICATE:
                    self.num_duplicates += 1
            case StartEpoch():
                if self.order.start_epoch(message.epoch):
                    self.starts.append(message)
                    self.executor.start_epoch(message)
                    self.done = 0
            case PrepareConstraint():
                answer = lambda digest, fault: self.send(ConstraintPrepared(self.rank, digest, fault))
                self.executor.prepare(message.constraint, answer)
            case StopWorker():
                self.stopped.set()
            case HelloWanted():
                self.send(msgspec.structs.replace(self.hello, last_epoch=self.order.epoch))

    def _collect(self) -> None:
        while not self._holds() and (result := self.executor.collect(wait=False)) is not None:
            self.done = result.step
            if self.rank == 0:
                self.send(result)

    def _holds(self) -> bool:
        return self.hold_results.is_set() or (self.hold_after is not None and self.done >= self.hold_after)


@contextlib.contextmanager
def engine_thread(run_dir: Path, record: Record | None = None, **options: Any) -> Iterator[Engine]:
    """The engine in a thread; its sockets are real. Stopped at once at the end."""
    engine = Engine(EngineConfig(run_dir=str(run_dir), check_invariants=True, **options), record)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(engine.run()), daemon=True)
    thread.start()
    engine.exit_code = lambda: (thread.join(LIVENESS_S), codes[0])[1]  # type: ignore[attr-defined]
    try:
        yield engine
    finally:
        if thread.is_alive():
            engine.stop()
            engine.stop()
        thread.join(LIVENESS_S)
        assert codes, "the engine did not end in order"


@contextlib.contextmanager
def rig_workers(run_dir: Path, count: int, **options: Any) -> Iterator[list[RigWorker]]:
    """A complete group of ranks in threads."""
    workers = [RigWorker(run_dir, rank, count, **options) for rank in range(count)]
    for worker in workers:
        worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.quit.set()
        for worker in workers:
            worker.join(LIVENESS_S)


class RoleProcess:
    """A role as a process of its own, started again whenever it ends, as a supervisor would, until `close`."""

    def __init__(self, code: str, respawn: bool = True) -> None:
        self.code = code
        self.respawn = respawn
        self.pids: list[int] = []
        self.exit_codes: list[int] = []
        self.closing = False
        self.spawned = threading.Condition()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.wait_spawned(1)

    def _run(self) -> None:
        while True:
            with self.spawned:
                if self.closing:
                    return
                self.process = subprocess.Popen([sys.executable, "-c", self.code], env={**os.environ, "OMP_NUM_THREADS": "1"})
                self.pids.append(self.process.pid)
                self.spawned.notify_all()
            self.exit_codes.append(self.process.wait())
            if not self.respawn:
                return

    def wait_spawned(self, count: int) -> int:
        """Wait for the count-th incarnation; its pid."""
        with self.spawned:
            assert self.spawned.wait_for(lambda: len(self.pids) >= count, LIVENESS_S)
            return self.pids[count - 1]

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        with self.spawned:
            self.closing = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
        self.thread.join(LIVENESS_S)


def worker_process(run_dir: Path, rank: int = 0, world_size: int = 1, **options: Any) -> RoleProcess:
    """A real worker process that runs the oracle."""
    config = {
        "run_dir": str(run_dir), "model": "oracle", "rank": rank, "tensor_parallel_size": world_size, "executor": "oracle",
        "log_level": "error", "max_model_len": 2048, "num_blocks": 512, **options,
    }  # fmt: skip
    imports = "import sys; from pagecast_worker.config import WorkerConfig; from pagecast_worker.main import run"
    return RoleProcess(f"{imports}; sys.exit(run(WorkerConfig(**{config!r})))")


def scheduler_process(run_dir: Path, respawn: bool = True, **options: Any) -> RoleProcess:
    """A real scheduler process."""
    config = {"run_dir": str(run_dir), "log_level": "error", "check_invariants": True, **options}
    imports = "import sys; from pagecast_scheduler.engine.config import EngineConfig; from pagecast_scheduler.engine.main import run"
    return RoleProcess(f"{imports}; sys.exit(run(EngineConfig(**{config!r})))", respawn)
