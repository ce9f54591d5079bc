"""Supervision of one host's cluster: starts every role, starts again what dies, and ends everything in order.

A thread of its own does all of it, because children are tied to the thread that spawned them. The scheduler repairs what a death
breaks; this only brings the process back (a rank together with all ranks: a group is complete or nothing).
"""

import atexit
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from pagecast_scheduler.launch.events import ChildExited, ChildHung, ChildStarted, Event, Failed, Ready, Stopping
from pagecast_scheduler.launch.output import OnOutput, OutputPump, to_stderr
from pagecast_scheduler.launch.process import Child, Lifeline, RoleSpec
from pagecast_scheduler.launch.pulses import Pulses
from pagecast_scheduler.launch.readiness import Readiness
from pagecast_scheduler.launch.restarts import RestartBudget, RestartPolicy
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir
from pagecast_scheduler.launch.stages import Stages

EXIT_OK: Final = 0
EXIT_GAVE_UP: Final = 1
EXIT_FAULT: Final = 1
"""How a worker ends that met an error of its own."""
EXIT_CONFIG: Final = 2
_LOAD_ATTEMPTS: Final = 2
_LOOK_S: Final = 0.1
"""How often files are looked at while the cluster starts; afterwards only signs of life are, now and then."""
_HEED_S: Final = 0.2
"""How often the main thread looks up. Python's handlers run in it alone, but the system may hand a signal to any thread, as it does to
one that came while the process was stopped; that wakes nobody."""
_DEFAULT_POLICY: Final = RestartPolicy()


def ignore(event: Event) -> None:
    """An on_event that wants to know nothing."""


class Supervisor:
    """A cluster of one host. Owns the run directory from `start` on and removes it at the end.

    Either `run_forever` in the main thread (with SIGINT and SIGTERM: the first ends in order, the second at once), or `start`,
    `wait_ready` and `stop` (also as a context manager). `on_event` is called from the supervising thread, `on_output` with every
    line a child writes.
    """

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        run_dir: RunDir,
        on_event: Callable[[Event], None] = ignore,
        on_output: OnOutput = to_stderr,
        policy: RestartPolicy = _DEFAULT_POLICY,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._run_dir = run_dir
        self._on_event, self._on_output = on_event, on_output
        self._budgets = {name: RestartBudget(policy) for name in self._specs}
        self._readiness = Readiness(run_dir.path, specs)
        self._pulses = Pulses(run_dir.path)
        self._children: dict[str, Child] = {}
        self._due: dict[str, float] = dict.fromkeys(self._specs, 0.0)  # when to spawn; monotonic seconds
        self._condemned: set[int] = set()  # pids of ranks that were killed because another one died
        self._load_faults = 0  # workers that ended with an error before anything served
        self._stages: Stages | None = None
        self._owner = os.getpid()
        self._stop_wanted = self._kill_wanted = False
        self._hurry_wanted = False
        self._wake_end, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._settled = threading.Event()  # ready, or never to be
        self._ended = threading.Event()
        self._addresses: tuple[str, ...] | None = None
        self.failure: Failed | None = None

    def start(self) -> None:
        """Begin to spawn. Returns at once."""
        atexit.register(self.stop)
        self._thread.start()

    def wait_ready(self, timeout: float) -> tuple[str, ...]:
        """The front ends' addresses once all of them serve. Raises LaunchError when the cluster ends, or time (seconds) runs out."""
        if not self._settled.wait(timeout):
            raise LaunchError(f"the cluster was not ready within {timeout:g} s", EXIT_GAVE_UP)
        if self.failure is not None:
            raise LaunchError(self.failure.line or f"{self.failure.name} failed", self.failure.exit_code)
        if self._addresses is None:
            raise LaunchError("the cluster was stopped while it started", EXIT_OK)
        return self._addresses

    def run_forever(self) -> int:
        """Start, and stay until a signal or a failure ends the cluster; returns the exit code. Main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.start()
            while not self._ended.wait(_HEED_S):
                pass
            return self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> int:
        """End in the order of `stages`. Returns the exit code; may be called again, but not from on_event or on_output. In a fork of the
        process that started the cluster it does nothing: the thread that would is not there."""
        if os.getpid() != self._owner:
            return EXIT_OK
        if self._thread.ident is None:
            self._run_dir.close()
            return EXIT_OK
        self._stop_wanted = True
        self._wake()
        self._ended.wait()
        self._thread.join()
        atexit.unregister(self.stop)
        return self.failure.exit_code if self.failure else EXIT_OK

    def kill(self) -> None:
        """End at once: SIGKILL to every process. `stop` then has nothing left to wait for."""
        self._stop_wanted = self._kill_wanted = True
        self._wake()

    def __enter__(self) -> "Supervisor":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop_wanted:
            self._hurry_wanted = True
        self._stop_wanted = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"!")
        except OSError:
            pass  # it has enough to wake up for, or is over already

    def _supervise(self) -> None:
        life, pump = Lifeline(), OutputPump(self._on_output)
        selector = selectors.DefaultSelector()
        selector.register(self._wake_end, selectors.EVENT_READ)
        try:
            while not (self._stages and not self._children):
                self._spawn_due(life, pump, selector)
                self._look_at_files()
                self._end_hung()
                for key, _ in selector.select(self._patience()):
                    if key.data is None:
                        self._wake_end.recv(4096)
                    else:
                        selector.unregister(key.fd)
                        self._on_exit(key.data)
                self._drive_stop()
        except Exception as error:  # our own bug, or the system refuses to start a process
            self.failure = Failed("supervisor", EXIT_GAVE_UP, f"supervision failed: {type(error).__name__}: {error}")
            raise
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
                child.reap()
            pump.close()
            selector.close()
            life.close()
            self._run_dir.close()
            self._wake_end.close()
            self._waker.close()
            self._settled.set()
            self._ended.set()

    def _spawn_due(self, life: Lifeline, pump: OutputPump, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            child = self._children[name] = Child(self._specs[name], life, pump)
            selector.register(child.pidfd, selectors.EVENT_READ, child)
            self._on_event(ChildStarted(name, child.pid))

    def _look_at_files(self) -> None:
        if self._settled.is_set():
            return
        addresses = self._readiness.addresses()  # before the progress, so that none of it is missed once all are ready
        for news in self._readiness.loading():
            self._on_event(news)
        if addresses is not None and self._stages is None:
            self._addresses = addresses
            self._settled.set()
            self._on_event(Ready(addresses))

    def _end_hung(self) -> None:
        """A process that is there and does nothing any more is as good as dead, and starts again like a dead one."""
        for child, silent in self._pulses.hung(self._children.values(), time.monotonic()):
            self._on_event(ChildHung(child.spec.name, child.pid, silent))
            child.signal(signal.SIGKILL)

    def _patience(self) -> float:
        """Seconds until something is due by time alone."""
        now = time.monotonic()
        waits = [due - now for due in self._due.values()] + [self._pulses.next_look - now]
        if not self._settled.is_set():
            waits.append(_LOOK_S)
        if self._stages and self._stages.deadline is not None:
            waits.append(self._stages.deadline - now)
        return max(0.0, min(waits))

    def _on_exit(self, child: Child) -> None:
        code, spec = child.reap(), child.spec
        del self._children[spec.name]
        self._readiness.forget(spec)
        if self._stages and not self._stages.may_restart(spec.role):
            self._on_event(ChildExited(spec.name, child.pid, code, None))
            return
        delay = self._budgets[spec.name].died(time.monotonic())
        if delay is None or self._cannot_start(spec, code):
            child.stream.closed.wait(timeout=1.0)
            self._on_event(ChildExited(spec.name, child.pid, code, None))
            self._fail(Failed(spec.name, EXIT_CONFIG if code == EXIT_CONFIG else EXIT_GAVE_UP, child.stream.last_line))
        else:
            self._due[spec.name] = time.monotonic() + delay
            self._on_event(ChildExited(spec.name, child.pid, code, delay))
            self._end_group(child)

    def _cannot_start(self, spec: RoleSpec, code: int) -> bool:
        """Nothing has served yet, and this process says that it never will: as configured, or with the ranks that there are."""
        if self._settled.is_set():
            return False
        if spec.role == "worker" and code == EXIT_FAULT:  # an error while it loads, however long that takes, comes again
            self._load_faults += 1
            return self._load_faults >= _LOAD_ATTEMPTS
        hopeless = (EXIT_CONFIG, EXIT_GAVE_UP) if spec.role == "scheduler" else (EXIT_CONFIG,)
        return code in hopeless

    def _end_group(self, dead: Child) -> None:
        """A rank died: the others cannot go on without it, and while they load nobody else knows them. They start again together."""
        if dead.spec.role != "worker" or dead.pid in self._condemned:
            self._condemned.discard(dead.pid)
            return
        for child in self._children.values():
            if child.spec.role == "worker" and child.pid not in self._condemned:
                self._condemned.add(child.pid)
                child.signal(signal.SIGKILL)

    def _fail(self, failure: Failed) -> None:
        """Nothing can be saved by draining: tell everyone at once."""
        if self.failure is None:
            self.failure = failure
            self._on_event(failure)
            self._stages = Stages.at_once()

    def _drive_stop(self) -> None:
        if self._stop_wanted and self._stages is None:
            self._stages = Stages.in_order()
        if self._stages is None:
            return
        if self._hurry_wanted:
            self._hurry_wanted = False
            self._stages.hurry()
        if self._kill_wanted:
            self._kill_wanted = False
            self._stages.kill()
        order = self._stages.next([child.spec for child in self._children.values()], time.monotonic())
        self._due = {name: due for name, due in self._due.items() if self._stages.may_restart(self._specs[name].role)}
        if order is not None and order[1]:
            number, names = order
            self._on_event(Stopping(names))
            for name in names:
                self._children[name].signal(number)
