"""The worker group: one link per rank, the same plans to each, and the certainty that every rank got every plan.

Owns who the ranks are (hello, incarnation, pidfd), what they were sent in this epoch and what they are known to have. Decides
nothing about recovery: it reports `Lost` and does what it is told (`start`, `condemn`).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.gathering import Gathering, Member
from pagecast_scheduler.engine.hello import foreign_build, join_mismatch, worker_mismatch
from pagecast_scheduler.engine.link import ForeignHello, Router
from pagecast_scheduler.engine.logs import logger
from pagecast_scheduler.engine.processes import ProcessGone, Watched
from pagecast_scheduler.engine.recovery import SECOND
from pagecast_wire import codec
from pagecast_wire.intake import HelloWanted, LoadProgress
from pagecast_wire.plan import LogLevel, PrepareConstraint, StartEpoch, StepPlan, StopWorker
from pagecast_wire.result import ConstraintPrepared, GroupJoin, Heartbeat, PlanGap, StepResult, WorkerFault, WorkerHello
from pagecast_wire.sampling import Constraint

RESEND_AFTER = SECOND
"""A heartbeat that does not show a plan sent so long ago (microseconds) makes it be sent again."""


@dataclass(frozen=True)
class Lost:
    """The group cannot go on in this epoch. kill: its processes are not to be trusted either, but for a rank that is new already.
    is_memory: a step did not fit the device's memory."""

    reason: str
    rank: int
    kill: bool = True
    is_replaced: bool = False
    is_memory: bool = False


@dataclass
class Rank:
    """One live worker process. acked: last step of the current epoch that it is known to have. Times in microseconds."""

    hello: WorkerHello
    identity: bytes
    process: Watched
    heard: int
    acked: int = 0
    resent: int = 0
    owed_step: int = 0  # a heartbeat has reported this step as completed while its result had not come
    is_cut: bool = False  # its link is gone; what it sent before may still have to be read


@dataclass
class WorkerGroup:
    """Everything about the ranks. Handles messages of the workers' socket one by one."""

    config: EngineConfig
    router: Router
    incarnation: str
    ranks: dict[int, Rank] = field(default_factory=dict)
    load: dict[int, LoadProgress] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    num_refused: int = 0
    num_resent: int = 0
    log_level: str = ""

    def __post_init__(self) -> None:
        self._log = logger("workers")
        self._reference: WorkerHello | None = None
        self._condemned: set[str] = set()
        self._asked: set[bytes] = set()
        self._silent_since: dict[int, int] = {}
        self._start: StartEpoch | None = None
        self._started = 0
        self._plans: deque[tuple[int, bytes, int]] = deque()
        self._last_step = 0
        self._last_result = 0
        self._gathering = Gathering(self.config.tensor_parallel_size)

    @property
    def is_complete(self) -> bool:
        """Every rank has said an acceptable hello and is not known to be dead."""
        return len(self.ranks) == self.config.tensor_parallel_size

    @property
    def is_open(self) -> bool:
        """An epoch has been started on this group."""
        return self._start is not None

    @property
    def reference(self) -> WorkerHello | None:
        """The hello that every other one must agree with, in this and in later epochs."""
        return self._reference

    @property
    def min_blocks(self) -> int:
        """Blocks that every rank of the complete group has room for."""
        return min(rank.hello.num_blocks for rank in self.ranks.values())

    @property
    def last_epoch(self) -> int:
        """Highest epoch that any rank of the group has seen."""
        return max((rank.hello.last_epoch for rank in self.ranks.values()), default=0)

    def receive(self, identity: bytes, message: Any, now: int) -> StepResult | ConstraintPrepared | Lost | None:
        """Take one message. A result is returned only if it is the next one of this epoch from rank 0, an answer about a constraint only
        of the open group."""
        match message:
            case ConstraintPrepared():
                return message if self._start is not None and self._sender(identity, message.rank) is not None else None
            case StepResult():
                return self._on_result(identity, message, now)
            case Heartbeat():
                return self._on_heartbeat(identity, message, now)
            case PlanGap():
                return self._on_gap(identity, message, now)
            case WorkerHello():
                return self._on_hello(identity, message, now)
            case GroupJoin():
                return self._on_join(identity, message, now)
            case LoadProgress():
                if 0 <= message.rank < self.config.tensor_parallel_size:
                    self.load[message.rank] = message
                    self._silent_since[message.rank] = now
            case WorkerFault():
                return self._on_fault(identity, message)
            case ForeignHello():
                self._refuse(identity, message.rank, "", foreign_build(message))
        return None

    def _on_hello(self, identity: bytes, hello: WorkerHello, now: int) -> Lost | None:
        self._asked.discard(identity)
        if hello.incarnation in self._condemned:
            self.router.send(identity, StopWorker())
            return None
        present = self.ranks.get(hello.rank)
        if present is not None and present.hello.incarnation == hello.incarnation:
            present.identity, present.heard, present.is_cut = identity, now, False
            return None
        reason = worker_mismatch(hello, self.config, self._reference)
        if reason is not None:
            self._refuse(identity, hello.rank, hello.incarnation, reason)
            return None
        if self._is_left_over(hello):
            self._condemned.add(hello.incarnation)
            self.router.send(identity, StopWorker())
            return None
        try:
            process = Watched(hello.pid, hello.pid_namespace)
        except ProcessGone:
            return None
        replaced = present is not None and self.is_open
        self.condemn([hello.rank])
        if self._reference is None:
            self._reference = hello
        self.refusals.pop(hello.rank, None)
        self._gathering.leave(hello.rank)
        self.ranks[hello.rank] = Rank(hello, identity, process, heard=now)
        if self.log_level or hello.last_epoch:  # one that a scheduler before this one left may hold what was set there
            self.router.send(identity, LogLevel(self.log_level))
        self._log.info("rank joined", rank=hello.rank, pid=hello.pid, incarnation=hello.incarnation, num_blocks=hello.num_blocks)
        return Lost("a new process took its place", hello.rank, is_replaced=True) if replaced else None

    def _is_left_over(self, hello: WorkerHello) -> bool:
        """Its group has ended, or is being formed anew without it."""
        others = {rank.hello.group for number, rank in self.ranks.items() if number != hello.rank}
        return hello.group != self._gathering.group if self._gathering.members else bool(others - {hello.group})

    def _on_join(self, identity: bytes, join: GroupJoin, now: int) -> Lost | None:
        """A rank wants to meet the others. Whatever group there was cannot go on: this process was not in it."""
        if join.incarnation in self._condemned:
            return None
        if 0 <= join.rank < self.config.tensor_parallel_size:
            self._silent_since[join.rank] = now
        if self._gathering.knows(join):
            self._gathering.members[join.rank].identity = identity
            if self._gathering.formed is not None:
                self.router.send(identity, self._gathering.formed)
            return None
        reason = join_mismatch(join, self.config, self._reference or self._gathering.reference)
        if reason is not None:
            self._refuse(identity, join.rank, join.incarnation, reason)
            return None
        try:
            process = Watched(join.pid, join.pid_namespace)
        except ProcessGone:
            return None
        lost = self._end_group_for(join)
        self.refusals.pop(join.rank, None)
        self._gathering.members[join.rank] = Member(join, identity, process)
        self._log.info("rank waits for the others", rank=join.rank, pid=join.pid, incarnation=join.incarnation)
        formed = self._gathering.form()
        if formed is not None:
            self._log.info("group formed", group=formed.group, address=formed.address)
            for member in self._gathering.members.values():
                self.router.send(member.identity, formed)
        return lost

    def _end_group_for(self, join: GroupJoin) -> Lost | None:
        """Make room for a rank that has just started: end the group that it replaces a member of, and the process it replaces."""
        lost = Lost("a new process took its place", join.rank) if self.is_open else None
        replaced = self._gathering.members.get(join.rank)
        if self.ranks or self._gathering.group:
            self._end_group()
        elif replaced is not None:
            self._gathering.leave(join.rank)
            self._condemned.add(replaced.join.incarnation)
        return lost

    def _end_group(self) -> None:
        """End every process of the group that was formed, whatever it is doing."""
        self.condemn([number for number, rank in self.ranks.items() if rank.hello.group])
        for member in self._gathering.dissolve():
            self._condemned.add(member.join.incarnation)
            self._end(member.process, member.identity)

    def _refuse(self, identity: bytes, rank: int, incarnation: str, reason: str) -> None:
        self.num_refused += 1
        self.refusals[rank] = reason
        if incarnation:
            self._condemned.add(incarnation)
        self._log.error("rank refused", rank=rank, reason=reason)
        self.router.send(identity, StopWorker(f"refused by the scheduler: {reason}"))

    def _on_result(self, identity: bytes, result: StepResult, now: int) -> StepResult | Lost | None:
        rank = self._sender(identity, result.rank)
        if rank is None:
            self._ask_for_hello(identity)
            return None
        rank.heard = now
        if self._start is None or result.epoch != self._start.epoch or result.step > self._last_step:
            return None
        rank.acked = max(rank.acked, result.step)
        if result.rank != 0 or result.step <= self._last_result:
            return None
        if result.step != self._last_result + 1:
            return Lost(f"result of step {self._last_result + 1} is missing, step {result.step} came", 0, kill=False)
        self._last_result = result.step
        return result

    def _on_heartbeat(self, identity: bytes, beat: Heartbeat, now: int) -> Lost | None:
        rank = self.ranks.get(beat.rank)
        if rank is None or rank.hello.incarnation != beat.incarnation:
            if beat.incarnation not in self._condemned:
                self._ask_for_hello(identity)
            return None
        rank.heard = now
        if self._start is None:
            return None
        if beat.epoch != self._start.epoch:
            if now - self._started > RESEND_AFTER:
                self._resend(rank, 0, now, with_start=True)
            return None
        rank.acked = max(rank.acked, min(beat.last_step, self._last_step))
        self._forget_acked()
        if beat.rank == 0 and beat.last_step > self._last_result:
            if rank.owed_step > self._last_result:
                return Lost(f"result of step {rank.owed_step} never came", 0, kill=False)
            rank.owed_step = beat.last_step
        oldest = next((sent for step, _, sent in self._plans if step > rank.acked), now)
        if now - max(oldest, rank.resent) > RESEND_AFTER:
            self._resend(rank, rank.acked, now)
        return None

    def _on_gap(self, identity: bytes, gap: PlanGap, now: int) -> Lost | None:
        rank = self._sender(identity, gap.rank)
        if rank is None:
            self._ask_for_hello(identity)
            return None
        rank.heard = now
        if self._start is None:
            return None
        if gap.epoch != self._start.epoch:
            self._resend(rank, 0, now, with_start=True)
            return None
        if self._plans and gap.last_step + 1 < self._plans[0][0]:
            return Lost(f"asks again for step {gap.last_step + 1}, which it was known to have", gap.rank)
        rank.acked = max(rank.acked, min(gap.last_step, self._last_step))
        self._resend(rank, gap.last_step, now)
        return None

    def _on_fault(self, identity: bytes, fault: WorkerFault) -> Lost | None:
        self._log.error("worker fault", rank=fault.rank, epoch=fault.epoch, step=fault.step, kind=fault.kind, detail=fault.detail)
        if self._sender(identity, fault.rank) is None:
            self._leave(fault.rank, identity)
            return None
        return Lost(f"reported a fault of kind {fault.kind}", fault.rank, is_memory=fault.kind == "out_of_memory")

    def _sender(self, identity: bytes, rank: int) -> Rank | None:
        """The rank that a message claims to come from, if it comes over that rank's own link."""
        known = self.ranks.get(rank)
        return known if known is not None and known.identity == identity else None

    def _ask_for_hello(self, identity: bytes) -> None:
        if identity not in self._asked:
            self._asked.add(identity)
            self.router.send(identity, HelloWanted(self.incarnation))

    def start(self, start: StartEpoch, now: int) -> Lost | None:
        """Open an epoch on the complete group."""
        self._start, self._started = start, now
        self._plans.clear()
        self.load.clear()
        self._last_step = self._last_result = 0
        for rank in self.ranks.values():
            rank.acked = rank.owed_step = rank.resent = 0
            rank.heard = now
        return self._broadcast(codec.encode(start))

    def send_plan(self, plan: StepPlan, now: int) -> Lost | None:
        """The same bytes to every rank; kept until every rank is known to have them."""
        data = codec.encode(plan)
        self._plans.append((plan.step, data, now))
        self._last_step = plan.step
        if len(self.ranks) == 1:
            self._forget_acked()
        return self._broadcast(data)

    def send_constraint(self, constraint: Constraint) -> Lost | None:
        """Ask every rank to compile it."""
        return self._broadcast(codec.encode(PrepareConstraint(constraint)))

    def _broadcast(self, data: bytes) -> Lost | None:
        for number, rank in self.ranks.items():
            delivery = self.router.send_bytes(rank.identity, data)
            if delivery == "full":
                return Lost("its link is full", number)
            rank.is_cut |= delivery == "gone"
        return None

    def _resend(self, rank: Rank, after: int, now: int, with_start: bool = False) -> None:
        """Send again what follows step `after` of this epoch. The rank ignores what it has already."""
        rank.resent = now
        if with_start and self._start is not None:
            self.router.send(rank.identity, self._start)
        for step, data, _ in self._plans:
            if step > after:
                self.num_resent += 1
                self.router.send_bytes(rank.identity, data)

    def _forget_acked(self) -> None:
        acked = min(rank.acked for rank in self.ranks.values())
        while self._plans and self._plans[0][0] <= acked:
            self._plans.popleft()

    def exited(self, fd: int) -> Lost | None:
        """The process behind this pidfd has ended."""
        for number, rank in self.ranks.items():
            if rank.process.fd == fd:
                self._let_go(rank)
                del self.ranks[number]
                if rank.hello.group and not self.is_open:
                    self._end_group()
                return Lost("its process ended", number)
        member = self._gathering.member_of(fd)
        if member is not None:
            self._leave(member.join.rank, member.identity)
        return None

    def _leave(self, rank: int, identity: bytes) -> None:
        """A rank that had joined ended before its hello: the others cannot go on without it."""
        member = self._gathering.members.get(rank)
        if member is not None and member.identity == identity:
            self._condemned.add(member.join.incarnation)
            self._gathering.leave(rank)
            if self._gathering.formed is not None:
                self._end_group()

    def set_log_level(self, level: str) -> None:
        """Tell every rank, and those that come later; "" is what each was configured with."""
        self.log_level = level
        for rank in self.ranks.values():
            self.router.send(rank.identity, LogLevel(level))

    def check(self, now: int) -> Lost | None:
        """Once in a while: a rank whose link is gone or whose heartbeats stopped is lost. By now a rank that could say why has said it."""
        self._asked.clear()
        limit = int(self.config.heartbeat_timeout_s * SECOND)
        for number, rank in self.ranks.items():
            if rank.is_cut:
                return Lost("its link is gone", number)
            if now - rank.heard > limit:
                return Lost(f"no heartbeat for {(now - rank.heard) / SECOND:.1f} s", number)
        return None

    def forgive(self, pause: int) -> None:
        """The scheduler itself was stopped for so long (microseconds)."""
        for rank in self.ranks.values():
            rank.heard += pause
        self._silent_since = {number: since + pause for number, since in self._silent_since.items()}

    def missing(self, since: int, now: int) -> str | None:
        """Names the ranks that have been silent for rank_timeout_s since `since` (or their last sign of loading)."""
        limit = int(self.config.rank_timeout_s * SECOND)
        size = self.config.tensor_parallel_size
        late = [r for r in range(size) if r not in self.ranks and now - max(since, self._silent_since.get(r, since)) > limit]
        if not late:
            return None
        names = ", ".join(f"rank {r}" + (f" (refused: {self.refusals[r]})" if r in self.refusals else "") for r in late)
        return f"no worker for {names} of {size} within {self.config.rank_timeout_s:g} s"

    def condemn(self, numbers: Iterable[int]) -> None:
        """End these ranks' processes: by SIGKILL where they can be reached, else by asking. Their later messages are ignored."""
        for number in numbers:
            rank = self.ranks.pop(number, None)
            if rank is not None:
                self._condemned.add(rank.hello.incarnation)
                self._end(rank.process, rank.identity)

    def _end(self, process: Watched, identity: bytes) -> None:
        if not process.kill():
            self.router.send(identity, StopWorker())
        process.close()

    def _let_go(self, rank: Rank) -> None:
        self._condemned.add(rank.hello.incarnation)
        rank.process.close()

    def close_epoch(self) -> None:
        """No plan of the epoch is kept, no result of it is taken any more."""
        self._start = None
        self._plans.clear()

    @property
    def pidfds(self) -> list[int]:
        """What to poll for the end of a process."""
        return [rank.process.fd for rank in self.ranks.values() if rank.process.fd >= 0] + self._gathering.pidfds
