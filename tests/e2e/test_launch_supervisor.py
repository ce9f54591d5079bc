"""Supervision with stand-in roles: start, readiness, restart, budget, order of the end, nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from e2e.launch_roles import WAIT_S, Events, Notes, exited, roles, started, wait_ended

from pagecast_scheduler.launch import pulses
from pagecast_scheduler.launch.events import ChildExited, ChildHung, ChildStarted, Failed, Loading, Ready, Stopping
from pagecast_scheduler.launch.restarts import RestartPolicy
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir
from pagecast_scheduler.launch.supervisor import Supervisor
from pagecast_wire.pulse import Pulse, last_beat


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "notes")


def supervisor(tmp_path: Path, events: Events, policy: RestartPolicy | None = None, **modes: str) -> Supervisor:
    run_dir = RunDir.take(str(tmp_path / "run"))
    specs = roles(run_dir, tmp_path / "notes", grace_s=float(modes.pop("grace_s", "20")), **modes)
    return Supervisor(specs, run_dir, events, policy=policy or RestartPolicy(first_delay_s=0.01))


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_ready_then_an_end_in_order(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, frontend_0="last") as cluster:
        (address,) = cluster.wait_ready(WAIT_S)
        assert address.startswith("127.0.0.1:")
        assert events.wait(lambda e: isinstance(e, Loading) and e.rank == 1) == Loading(1, "weights", 3, 7)
        notes.wait("worker-0 runs", "worker-1 runs", "scheduler runs", "frontend-0 runs")
        assert cluster.stop() == 0
    ends = [line for line in notes.lines() if line.endswith("ends")]
    assert ends[:2] == ["frontend-0 ends", "scheduler ends"] and sorted(ends[2:]) == ["worker-0 ends", "worker-1 ends"]
    assert [e.names for e in events.all if isinstance(e, Stopping)] == [("frontend-0",), ("scheduler",), ("worker-0", "worker-1")]
    assert isinstance(events.wait(lambda e: isinstance(e, Ready)), Ready)
    assert gone(events.pids()) and not (tmp_path / "run").exists()
    assert cluster.stop() == 0, "a second stop changes nothing"


def test_a_killed_process_is_started_again(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events) as cluster:
        cluster.wait_ready(WAIT_S)
        for name in ("worker-1", "scheduler", "frontend-0"):
            first = events.wait(started(name))
            assert isinstance(first, ChildStarted)
            os.kill(first.pid, signal.SIGKILL)
            exit_event = events.wait(exited(name))
            assert isinstance(exit_event, ChildExited)
            assert (exit_event.pid, exit_event.code) == (first.pid, -signal.SIGKILL) and exit_event.restart_in_s is not None
            events.wait(started(name), count=2)
    assert cluster.failure is None and gone(events.pids())


def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "HUNG_S", 0.3)
    monkeypatch.setattr(pulses, "LOOK_S", 0.1)
    events = Events()
    with supervisor(tmp_path, events, scheduler="hangs") as cluster:
        hung = events.wait(lambda e: isinstance(e, ChildHung))
        assert isinstance(hung, ChildHung) and hung.name == "scheduler" and hung.silent_s > 0.3
        assert events.wait(exited("scheduler")) == ChildExited("scheduler", hung.pid, -signal.SIGKILL, 0.01)
        events.wait(started("scheduler"), count=2)
        assert cluster.stop() == 0
    assert {e.name for e in events.all if isinstance(e, ChildHung)} == {"scheduler"}, "without a pulse nobody is judged"


def test_who_hangs(tmp_path: Path) -> None:
    def child(name: str, started_at: float) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name=name), started=started_at)

    now = time.monotonic()
    alive, silent, new, idle = (child(name, now - 100) for name in ("alive", "silent", "new", "idle"))
    new.started = now + 5
    for name in ("silent", "new", "idle"):
        Pulse(str(tmp_path / f"{name}.pulse")).beat()
    Pulse(str(tmp_path / "idle.pulse")).end()
    nowhere = Pulse(str(tmp_path / "no" / "folder"))
    nowhere.beat()
    look = pulses.Pulses(tmp_path)
    children = [alive, silent, new, idle]
    for second in range(int(pulses.HUNG_S) + 3):
        (tmp_path / "alive.pulse").write_bytes(int((now + second) * 1e9).to_bytes(8, "little"))
        found = look.hung(children, now + second)
        assert found == [] or second > pulses.HUNG_S
    assert [each.spec.name for each, _ in found] == ["silent"]
    assert look.hung(children, now + 60) == [], "the supervisor itself was stopped"
    assert last_beat(str(tmp_path / "idle.pulse")) is None and last_beat(str(tmp_path / "nothing")) is None


def test_a_dead_rank_takes_its_group_with_it_once(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, frontend_0="silent") as cluster:
        first = events.wait(started("worker-1"))
        assert isinstance(first, ChildStarted)
        notes.wait("worker-0 runs", "worker-1 runs", "scheduler runs", "frontend-0 runs")
        os.kill(first.pid, signal.SIGKILL)
        events.wait(started("worker-0"), count=2)
        events.wait(started("worker-1"), count=2)
        cluster.kill()
        assert cluster.stop() == 0
    deaths = [e.name for e in events.all if isinstance(e, ChildExited) and e.restart_in_s is not None]
    assert sorted(deaths) == ["worker-0", "worker-1"]


def test_what_a_dead_front_end_published_is_withdrawn(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, policy=RestartPolicy(first_delay_s=1000.0, max_delay_s=1000.0)) as cluster:
        cluster.wait_ready(WAIT_S)
        first = events.wait(started("frontend-0"))
        assert isinstance(first, ChildStarted)
        os.kill(first.pid, signal.SIGKILL)
        events.wait(exited("frontend-0"))
        assert not list((tmp_path / "run").glob("frontend-0.*"))


def test_a_worker_that_fails_to_load_twice_is_given_up_with_its_last_word(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, worker_1="fault", frontend_0="silent") as cluster:
        with pytest.raises(LaunchError, match="out of shared memory"):
            cluster.wait_ready(WAIT_S)
        assert cluster.stop() == 1
    faults = [e for e in events.all if isinstance(e, ChildExited) and e.name == "worker-1"]
    assert [e.code for e in faults] == [1, 1] and gone(events.pids())


def test_the_restart_budget_ends_the_cluster(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, policy=RestartPolicy(budget=3, first_delay_s=0.01), worker_1="crash", frontend_0="silent") as cluster:
        with pytest.raises(LaunchError) as caught:
            cluster.wait_ready(WAIT_S)
        assert caught.value.exit_code == 1
        assert cluster.stop() == 1
    delays = [e.restart_in_s for e in events.all if isinstance(e, ChildExited) and e.name == "worker-1"]
    assert delays == [0.01, 0.02, 0.04, None]
    assert gone(events.pids()) and not (tmp_path / "run").exists()


def test_a_wrong_configuration_ends_the_start_with_its_last_line(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, worker_0="wrong", frontend_0="silent") as cluster, pytest.raises(LaunchError) as caught:
        cluster.wait_ready(WAIT_S)
    assert (str(caught.value), caught.value.exit_code) == ("pagecast worker-0: no such model", 2)
    assert events.wait(lambda e: isinstance(e, Failed)) == Failed("worker-0", 2, "pagecast worker-0: no such model")
    assert gone(events.pids())


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, scheduler="stubborn", grace_s="4") as cluster:
        cluster.wait_ready(WAIT_S)
        notes.wait("scheduler runs")
        assert cluster.stop() == 0
    last = events.wait(exited("scheduler"))
    assert isinstance(last, ChildExited) and last.code == -signal.SIGKILL
    assert "scheduler refuses" in notes.lines()


def test_nobody_who_ends_as_told_is_said_to_start_again(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events) as cluster:
        cluster.wait_ready(WAIT_S)
        notes.wait("worker-0 runs", "scheduler runs", "frontend-0 runs")  # who has not begun yet does not heed a signal
        assert cluster.stop() == 0
    for name in ("frontend-0", "scheduler", "worker-0"):
        last = events.wait(exited(name))
        assert isinstance(last, ChildExited) and (last.code, last.restart_in_s) == (0, None)


def test_workers_are_still_started_again_while_front_ends_drain(tmp_path: Path, notes: Notes) -> None:
    events = Events()
    with supervisor(tmp_path, events, frontend_0="stubborn") as cluster:
        cluster.wait_ready(WAIT_S)
        first = events.wait(started("worker-0"))
        assert isinstance(first, ChildStarted)
        cluster._on_signal(signal.SIGTERM, None)
        events.wait(lambda e: isinstance(e, Stopping))
        os.kill(first.pid, signal.SIGKILL)
        events.wait(started("worker-0"), count=2)
        cluster.kill()
        assert cluster.stop() == 0
    assert gone(events.pids())


SERVE = textwrap.dedent("""
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from e2e.launch_roles import roles
    from pagecast_scheduler.launch.events import ChildStarted, Ready, Stopping
    from pagecast_scheduler.launch.run_dir import RunDir
    from pagecast_scheduler.launch.supervisor import Supervisor
    def tell(event):
        if isinstance(event, ChildStarted):
            print("pid", event.pid, flush=True)
        if isinstance(event, (Ready, Stopping)):
            print(type(event).__name__, flush=True)
    run_dir = RunDir.take(sys.argv[2])
    modes = dict(word.split("=") for word in sys.argv[4:])
    sys.exit(Supervisor(roles(run_dir, Path(sys.argv[3]), **modes), run_dir, tell).run_forever())
""")


class Serving:
    """A supervisor in a process of its own, with what it prints."""

    def __init__(self, tmp_path: Path, *modes: str) -> None:
        self.folder = tmp_path / "run"
        tests = str(Path(__file__).parents[1])
        argv = [sys.executable, "-c", SERVE, tests, str(self.folder), str(tmp_path / "notes"), *modes]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        self.pids: list[int] = []

    def until(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("pid "):
                self.pids.append(int(line.split()[1]))
            if line.strip() == word:
                return
        raise AssertionError(f"it ended before {word}")

    def wait(self) -> int:
        """The exit code; whoever it started is gone by then or soon."""
        code = self.process.wait(WAIT_S)
        wait_ended(self.pids)
        return code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    serving = Serving(tmp_path)
    serving.until("Ready")
    serving.process.send_signal(number)
    assert serving.wait() == 0
    assert len(serving.pids) == 4 and not serving.folder.exists()


def test_a_signal_is_heeded_that_came_while_the_process_was_stopped(tmp_path: Path) -> None:
    """The system may hand it to any thread then."""
    for turn in range(3):
        (tmp_path / str(turn)).mkdir()
        serving = Serving(tmp_path / str(turn))
        serving.until("Ready")
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            serving.process.send_signal(number)
        assert serving.wait() == 0


def test_a_signal_while_loading(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "frontend_0=silent")
    Notes(tmp_path / "notes").wait("worker-0 runs", "worker-1 runs", "scheduler runs", "frontend-0 runs")
    serving.process.terminate()
    serving.until("Stopping")
    assert serving.wait() == 0 and not serving.folder.exists()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "frontend_0=stubborn")
    serving.until("Ready")
    serving.process.terminate()
    serving.until("Stopping")
    serving.process.terminate()
    assert serving.wait() == 0 and not serving.folder.exists()


def test_nobody_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.until("Ready")
    serving.process.kill()
    assert serving.wait() == -signal.SIGKILL
    assert serving.folder.exists()
    with RunDir.take(str(serving.folder)) as taken:  # what it left does not stand in the next one's way
        assert not list(taken.path.glob("frontend*"))
