"""Stand-ins for the three roles, so that supervision can be tested without any of them: they publish, obey and misbehave as told."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from pagecast_scheduler.launch.events import ChildExited, ChildStarted, Event
from pagecast_scheduler.launch.process import RoleSpec
from pagecast_scheduler.launch.run_dir import RunDir

WAIT_S = 60.0

PROGRAM = r"""
import os, signal, sys, time
from pathlib import Path
from pagecast_wire.lifeline import die_with_parent
die_with_parent()
name, folder, notes, mode = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

def note(text):
    with notes.open("a") as file:
        file.write(f"{name} {text}\n")

def end(number, frame):
    note("ends")
    sys.exit(0)

if mode == "wrong":
    print("a first line", file=sys.stderr)
    print(f"pagecast {name}: no such model", file=sys.stderr)
    sys.exit(2)
if mode == "fault":
    print(f"pagecast {name}: out of shared memory", file=sys.stderr)
    sys.exit(1)
if mode == "crash":
    sys.exit(9)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, lambda number, frame: note("refuses"))
else:
    signal.signal(signal.SIGTERM, end)
if name.startswith("worker"):
    draft = folder / f"{name}.draft"
    draft.write_text('{"phase": "weights", "done": 3, "total": 7}')
    draft.rename(folder / f"{name}.progress")
if mode == "last":  # serves once the workers have loaded, as a real front end does
    while len(list(folder.glob("worker-*.progress"))) < 2:
        time.sleep(0.01)
if name.startswith("frontend") and mode != "silent":
    (folder / f"{name}.address").write_text(f"127.0.0.1:{os.getpid()}")
    (folder / f"{name}.serving").touch()
if mode == "hangs":
    from pagecast_wire.pulse import Pulse
    Pulse(str(folder / f"{name}.pulse")).beat()
note("runs")
while True:
    signal.pause()
"""


def ended(pid: int) -> bool:
    """Gone, or waiting only for its parent to look."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def wait_ended(pids: Sequence[int]) -> None:
    """Until all of these processes have."""
    deadline = time.monotonic() + WAIT_S
    while not all(map(ended, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if not ended(pid)]} live on"
        time.sleep(0.01)


class Notes:
    """What the roles wrote down, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def wait(self, *wanted: str) -> None:
        """Until all of these were written."""
        deadline = time.monotonic() + WAIT_S
        while not set(wanted) <= set(self.lines()):
            assert time.monotonic() < deadline, f"{wanted} missing in {self.lines()}"
            time.sleep(0.01)


def roles(run_dir: RunDir, notes: Path, grace_s: float = 20.0, **modes: str) -> list[RoleSpec]:
    """A front end, a scheduler and two workers. modes: what each is told, by name with "_" for "-"."""

    def spec(role: str, index: int = 0) -> RoleSpec:
        name = role if role == "scheduler" else f"{role}-{index}"
        mode = modes.get(name.replace("-", "_"), "ok")
        argv = [sys.executable, "-c", PROGRAM, name, str(run_dir.path), str(notes), mode]
        return RoleSpec(role, argv, index, grace_s)  # type: ignore[arg-type]

    return [spec("frontend"), spec("scheduler"), spec("worker", 0), spec("worker", 1)]


class Events:
    """Collects events; lets a test wait for one."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._news:
            self.all.append(event)
            self._news.notify_all()

    def wait(self, wanted: Callable[[Event], bool], count: int = 1) -> Event:
        """The count-th event of that kind, past or to come."""
        with self._news:
            found = self._news.wait_for(lambda: len([e for e in self.all if wanted(e)]) >= count, WAIT_S)
            assert found, f"no such event in {self.all}"
            return [event for event in self.all if wanted(event)][count - 1]

    def pids(self) -> list[int]:
        return [event.pid for event in self.all if isinstance(event, ChildStarted)]


def started(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, ChildStarted) and event.name == name


def exited(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, ChildExited) and event.name == name
