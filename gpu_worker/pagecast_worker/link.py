"""The worker's end of contract 3: one DEALER to the scheduler, the hello, the order of plans, and a heartbeat of its own.

Knows sockets and message order; knows nothing of what a plan does. `PlanOrder` is the rule by itself, without a socket.
"""

import os
import threading
import time
import uuid
from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from pagecast_wire.codec import WIRE_DIGEST, WIRE_VERSION, WireError, decode, encode
from pagecast_wire.host import pid_namespace
from pagecast_wire.intake import HelloWanted, ModelFacts
from pagecast_wire.keys import read_rank_keys
from pagecast_wire.plan import GroupFormed, StopWorker, ToWorker
from pagecast_wire.result import GroupJoin, Heartbeat, WorkerHello
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import LoadError, Stopped

HEARTBEAT_S: Final = 1.0
_FAILED_HANDSHAKE: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKES: Final = 5
"""Failed handshakes after which keys are to blame, and not a scheduler that ended at the wrong moment."""
_JOIN_AGAIN_MS: Final = 1000
_TELL_AFTER: Final = 2
"""Seconds, which are also beats and joins, without a scheduler after which the log says once what this rank waits for."""
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1000
_log = structlog.get_logger(__name__)


class Verdict(Enum):
    """What to do with a plan that arrived."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    GAP = "gap"  # ask for everything after the last step
    KNOWN_GAP = "known gap"  # asked already, the answer is on its way
    OTHER_EPOCH = "other epoch"


class PlanOrder:
    """Steps of one epoch are applied exactly once and without a gap, whatever arrives.

    A gap is reported once: a plan ahead of its turn is dropped, and so are those after it until the missing one came.
    """

    def __init__(self) -> None:
        self.epoch = 0  # highest epoch seen; no plan belongs to epoch 0
        self.last_step = 0
        self._gap_reported = False

    def start_epoch(self, epoch: int) -> bool:
        """Open a later epoch; False (and nothing changes) for the present one or an older one."""
        if epoch <= self.epoch:
            return False
        self.epoch, self.last_step, self._gap_reported = epoch, 0, False
        return True

    def judge(self, epoch: int, step: int) -> Verdict:
        """APPLY counts the plan as the last one; every other verdict leaves the order as it was."""
        if epoch != self.epoch or self.epoch == 0:
            return Verdict.OTHER_EPOCH
        if step <= self.last_step:
            return Verdict.DUPLICATE
        if step == self.last_step + 1:
            self.last_step, self._gap_reported = step, False
            return Verdict.APPLY
        if self._gap_reported:
            return Verdict.KNOWN_GAP
        self._gap_reported = True
        return Verdict.GAP


@dataclass(frozen=True, slots=True)
class Completed:
    """The last step whose result was sent; read by the heartbeat thread, replaced as a whole by the loop."""

    epoch: int = 0
    step: int = 0


class Link:
    """The sockets of one worker process life; all but the heartbeat's belongs to the loop's thread.

    The identity is new in every incarnation, so that the scheduler's ROUTER never takes this process for a dead one. A byte in the
    wake pipe makes the loop look around although no plan came: a signal's number, or HELLO from the heartbeat thread.
    """

    HELLO: Final = 255

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = uuid.uuid4().hex
        self.completed = Completed()
        self._keys = read_rank_keys(config.wire_keys) if config.wire_keys is not None else None
        self._context = zmq.Context()
        self.socket = self._dial("worker")
        self._hello: WorkerHello | None = None
        self._group = ""
        self.wake_fd, self.wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def _dial(self, purpose: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{purpose}-{self.config.rank}-{self.incarnation}".encode())
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.RCVHWM, 0)  # the scheduler bounds its plans in flight; a dropped one would only be asked for again
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.scheduler.encode()
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        return socket

    def connect(self) -> None:
        """Raises zmq.ZMQError for an endpoint that can never work, LoadError where keys do not fit; a scheduler that is not there yet is
        waited for."""
        monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKE) if self._keys is not None else None
        self.socket.connect(self.config.workers_endpoint)
        if monitor is not None:
            try:
                self._await_handshake(monitor)
            finally:
                self.socket.disable_monitor()

    def _await_handshake(self, monitor: zmq.Socket[bytes]) -> None:
        """A key that is not known is told at once; with another scheduler's key, or none, the connection just ends, time and again."""
        failures = 0
        if not monitor.poll(1000 * _TELL_AFTER):
            self._tell_waiting("the scheduler")
        while True:
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            failures += 1
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise LoadError(f"the scheduler at {self.config.workers_endpoint} does not know the key in {self.config.wire_keys}")
            if failures >= _HANDSHAKES:
                raise LoadError(f"the scheduler at {self.config.workers_endpoint} has other keys than {self.config.wire_keys}, or none")

    def join(self, model_digest: str, address: str) -> GroupFormed:
        """Meet the other ranks: waits until all have joined. address: where rank 0 waits for them, "" of others.

        Raises LoadError where this rank is refused, Stopped."""
        join = GroupJoin(
            wire_version=WIRE_VERSION, wire_digest=WIRE_DIGEST, incarnation=self.incarnation, pid=os.getpid(),
            pid_namespace=pid_namespace(), rank=self.config.rank, world_size=self.config.tensor_parallel_size,
            model_digest=model_digest, config_digest=self.config.digest(), address=address,
        )
        num_sent = 0
        while True:
            self.send(join)
            num_sent += 1
            if self.socket.poll(_JOIN_AGAIN_MS) and (formed := self.heed()) is not None:
                self._group = formed.group
                return formed
            if num_sent == _TELL_AFTER:
                self._tell_waiting("the scheduler and the other ranks")

    def heed(self) -> GroupFormed | None:
        """While loading: a group that was formed, if one was. Raises LoadError where this rank is refused, Stopped."""
        formed = None
        for message in self.receive():
            if isinstance(message, StopWorker):
                raise LoadError(message.reason) if message.reason else Stopped("the scheduler ended the group")
            if isinstance(message, GroupFormed):
                formed = message
        return formed

    def introduce(self, model: ModelFacts, num_blocks: int, step_sizes: tuple[int, ...]) -> None:
        """Say hello for the first time, and start the heartbeat. What came before the hello has no meaning any more."""
        self._hello = WorkerHello(
            wire_version=WIRE_VERSION,
            wire_digest=WIRE_DIGEST,
            incarnation=self.incarnation,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            rank=self.config.rank,
            world_size=self.config.tensor_parallel_size,
            last_epoch=0,
            model=model,
            config_digest=self.config.digest(),
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            group=self._group,
            step_sizes=step_sizes,
        )
        while self._receive() is not None:
            pass
        self.send(self._hello)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def hello_again(self, last_epoch: int) -> None:
        """Answer to HelloWanted: the same process, its weights still loaded."""
        if self._hello is not None:
            self.send(msgspec.structs.replace(self._hello, last_epoch=last_epoch))

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message))

    def receive(self) -> list[ToWorker]:
        """Everything that has arrived, in order; several wishes for a hello count as one. A malformed message is dropped: if it
        was a plan, the next one shows the gap."""
        messages: list[ToWorker] = []
        wanted = HelloWanted(scheduler_incarnation="") if self.HELLO in self._drain_wake() else None
        while (data := self._receive()) is not None:
            try:
                message = decode(data, "to_worker")
            except WireError as error:
                _log.warning("a message was dropped", reason=str(error))
                continue
            if isinstance(message, HelloWanted):
                wanted = message
            else:
                messages.append(message)
        return [wanted, *messages] if wanted else messages

    def close(self) -> None:
        """Give what was sent up to a second to leave, then close everything."""
        self.socket.close()
        self._context.term()  # ends the heartbeat thread too

    def _receive(self) -> bytes | None:
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _drain_wake(self) -> bytes:
        try:
            return os.read(self.wake_fd, 4096)
        except BlockingIOError:
            return b""

    def _beat(self) -> None:
        """Each second, from a thread of its own: a worker busy in a step still lives. IMMEDIATE keeps beats from piling up while
        there is no scheduler; a new scheduler answers the first that reaches it with HelloWanted, which is handed to the loop."""
        socket = self._dial("heartbeat")
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.config.workers_endpoint)
        due, num_unheard = time.monotonic() + HEARTBEAT_S, 0
        try:
            while True:
                if socket.poll(max(0, round((due - time.monotonic()) * 1000))):
                    if isinstance(_decoded(socket.recv()), HelloWanted):
                        self._wake()
                elif time.monotonic() >= due:
                    due += HEARTBEAT_S
                    num_unheard = 0 if self._send_beat(socket) else num_unheard + 1
                    if num_unheard == _TELL_AFTER:
                        self._tell_waiting("the scheduler")
        except zmq.ContextTerminated:
            socket.close()

    def _send_beat(self, socket: zmq.Socket[bytes]) -> bool:
        """False where nobody listens at present."""
        done = self.completed
        try:
            socket.send(encode(Heartbeat(self.config.rank, self.incarnation, done.epoch, done.step)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _tell_waiting(self, whom: str) -> None:
        _log.warning(f"waiting for {whom}", endpoint=self.config.workers_endpoint, rank=self.config.rank)

    def _wake(self) -> None:
        try:
            os.write(self.wake_write_fd, bytes([self.HELLO]))
        except BlockingIOError:
            pass  # the loop has enough to wake up for


def _decoded(data: bytes) -> ToWorker | None:
    try:
        return decode(data, "to_worker")  # type: ignore[no-any-return]
    except WireError:
        return None
