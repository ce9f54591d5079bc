"""The real roles under supervision, with the oracle: any of them may be killed, streams go on, and nothing is left at the end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.launch_roles import WAIT_S, Events, exited, started, wait_ended

from pagecast import Client, SamplingParams
from pagecast.types import Tokens
from pagecast_scheduler.launch.events import ChildStarted
from pagecast_scheduler.launch.process import RoleSpec
from pagecast_scheduler.launch.restarts import RestartPolicy
from pagecast_scheduler.launch.run_dir import RunDir
from pagecast_scheduler.launch.supervisor import Supervisor
from pagecast_worker.oracle import oracle_tokens

PROMPT = list(range(300, 340))
LENGTH = 600


def role_specs(folder: Path) -> list[RoleSpec]:
    def argv(role: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", "pagecast.cli.main", role, "--run-dir", str(folder), "--log-format", "json", *flags]

    oracle = ("--model", "oracle", "--executor", "oracle", "--oracle-step-us", "4000", "--num-blocks", "256")
    front = ("--model", "", "--port", "0", "--drain-announce-s", "0", "--drain-timeout-s", "1")
    words = {"scheduler": argv("scheduler"), "worker": argv("worker", *oracle), "frontend": argv("frontend", *front)}
    return [RoleSpec("scheduler", words["scheduler"]), RoleSpec("worker", words["worker"]), RoleSpec("frontend", words["frontend"])]


class Cluster:
    """A supervised cluster of three real processes and what its supervisor tells."""

    def __init__(self, run_dir: RunDir) -> None:
        self.events = Events()
        self.lines: list[str] = []
        specs = role_specs(run_dir.path)
        policy = RestartPolicy(first_delay_s=0.01)
        self.supervisor = Supervisor(specs, run_dir, self.events, lambda name, line: self.lines.append(line), policy)
        self.supervisor.start()
        (self.target,) = self.supervisor.wait_ready(WAIT_S)

    def pid(self, name: str, life: int = 1) -> int:
        event = self.events.wait(started(name), life)
        assert isinstance(event, ChildStarted)
        return event.pid


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(RunDir.take(str(tmp_path / "run")))
    yield cluster
    assert cluster.supervisor.stop() == 0, "\n".join(cluster.lines[-20:])
    assert not any(psutil.pid_exists(pid) for pid in cluster.events.pids())
    assert not (tmp_path / "run").exists()


def stream_while(cluster: Cluster, disturb: threading.Event, disturbed: threading.Event) -> list[int]:
    """The tokens of one long stream; `disturb` is set once some have come, and the rest is read when `disturbed` is set."""
    tokens: list[int] = []
    with Client(cluster.target) as client:
        sampling = SamplingParams(seed=11, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        for event in client.stream(PROMPT, sampling, timeout=120):
            if isinstance(event, Tokens):
                assert event.first_token_offset == len(tokens)
                tokens += event.token_ids
                if len(tokens) > 20 and not disturb.is_set():
                    disturb.set()
                    assert disturbed.wait(WAIT_S)
    return tokens


@pytest.mark.parametrize("victim", ["worker-0", "scheduler"])
def test_streams_survive_a_killed_process(cluster: Cluster, victim: str) -> None:
    disturb, disturbed = threading.Event(), threading.Event()

    def kill() -> None:
        if disturb.wait(WAIT_S):
            os.kill(cluster.pid(victim), signal.SIGKILL)
            cluster.events.wait(exited(victim))
            disturbed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    tokens = stream_while(cluster, disturb, disturbed)
    killer.join()
    assert tokens == oracle_tokens(PROMPT, LENGTH, seed=11)
    assert cluster.pid(victim, life=2) != cluster.pid(victim)
    others = {"worker-0", "scheduler", "frontend-0"} - {victim}
    assert not [event for event in cluster.events.all if any(exited(name)(event) for name in others)], "weights stay, streams stay"


SERVE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from e2e.test_launch_cluster import role_specs
from pagecast_scheduler.launch.events import ChildStarted, Ready
from pagecast_scheduler.launch.run_dir import RunDir
from pagecast_scheduler.launch.supervisor import Supervisor
def tell(event):
    if isinstance(event, ChildStarted):
        print(event.pid, flush=True)
    if isinstance(event, Ready):
        print("ready", flush=True)
run_dir = RunDir.take(sys.argv[2])
sys.exit(Supervisor(role_specs(run_dir.path), run_dir, tell).run_forever())
"""


def test_real_roles_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SERVE, str(Path(__file__).parents[1]), str(tmp_path / "run")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    words = [process.stdout.readline().strip() for _ in range(4)]
    assert words[3] == "ready"
    process.kill()
    process.wait(WAIT_S)
    wait_ended([int(word) for word in words[:3]])
