"""Ranks over a Ray cluster of two nodes on this host: placed there, watched there, started again, and ended with the cluster.

The cluster takes its time to start, so `make ray` runs what needs one, and `make test` the rest.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import psutil
import pytest
from e2e.cli_server import LIMIT_S, PAGECAST, pagecast, serve
from free_ports import free_port
from worker.tiny_model import write_config

from pagecast import LLM, Client, SamplingParams
from pagecast_scheduler.launch import ray_door
from pagecast_scheduler.launch.ray import OverRay
from pagecast_scheduler.launch.run_dir import LaunchError
from pagecast_worker.oracle import oracle_tokens

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")
pytestmark = pytest.mark.timeout(600)

PROMPT = list(range(300, 320))


SECRETS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2, "RAY_USAGE_STATS_ENABLED": "0"}
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1} | ({"node_ip_address": sys.argv[1]} if sys.argv[1] else {})
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
for _ in range(int(sys.argv[2])):
    cluster.add_node(**node)
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def cluster(host: str, secrets: dict[str, str], more_nodes: int = 0) -> Iterator[str]:
    """A cluster with one processor on each node, and the address of its head: this host's `host`, or "" for Ray's own choice."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | secrets
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, host, str(more_nodes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=environment,
    )
    assert process.stdout and process.stdin
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    finally:
        process.stdin.close()
        process.wait(timeout=LIMIT_S)


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster of two nodes, so that two ranks need both; it knows its users by a token."""
    with cluster("", SECRETS, more_nodes=1) as head:
        yield head


def outer_address() -> str:
    """One of this host's that others may reach."""
    found = [each.address for each in chain(*psutil.net_if_addrs().values()) if each.family == socket.AF_INET]
    outer = [address for address in found if not address.startswith("127.")]
    if not outer:
        pytest.skip("this host has no address but loopback")
    return outer[0]


def ranks(keys: str) -> list[psutil.Process]:
    """Rank processes with these keys, wherever Ray started them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_rank = "pagecast.cli.main" in words and words[words.index("pagecast.cli.main") + 1] == "worker"
        if is_rank and keys in words and "pagecast_scheduler.launch.ray" not in words:
            found.append(process)
    return found


@pytest.mark.ray
@needs_ray
def test_ranks_run_in_the_cluster_and_heal(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    keys = str(tmp_path / "keys")
    assert pagecast("keys", keys).returncode == 0
    words = ["--executor", "oracle", "--num-blocks", "64", "--launcher", "ray", "--tensor-parallel-size", "2", "--oracle-step-us", "20000"]
    words += ["--head", f"127.0.0.1:{free_port()}", "--wire-keys", keys, "--device", "cpu"]
    with serve(*words) as served:
        mine = ranks(keys)
        assert len(mine) == 2 and len({process.ppid() for process in mine}) == 2  # an actor each
        with Client(served.address) as client:
            sampling, answers = SamplingParams(seed=3, max_tokens=200, ignore_eos=True), []
            thread = threading.Thread(target=lambda: answers.append(client.generate(PROMPT, sampling, timeout=LIMIT_S).token_ids))
            thread.start()
            os.kill(mine[0].pid, signal.SIGKILL)
            thread.join(LIMIT_S)
            assert answers == [tuple(oracle_tokens(PROMPT, 200, seed=3))]
        assert served.end() == 0
    psutil.wait_procs(ranks(keys), timeout=LIMIT_S)
    assert not ranks(keys)


@pytest.mark.ray
@needs_ray
def test_a_model_over_two_nodes_gives_the_tokens_of_one_process(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    keys, shape = str(tmp_path / "keys"), str(write_config(tmp_path / "shape"))
    assert pagecast("keys", keys).returncode == 0
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(random_weights=shape, dtype="float32", num_blocks=64, device="cpu") as alone:
        expected = alone.generate([PROMPT], greedy)[0].outputs[0].token_ids
    words = ["--random-weights", shape, "--dtype", "float32", "--num-blocks", "64", "--device", "cpu", "--tensor-parallel-size", "2"]
    words += ["--launcher", "ray", "--head", f"127.0.0.1:{free_port()}", "--wire-keys", keys]
    with serve(*words) as served, Client(served.address) as client:
        assert len({process.ppid() for process in ranks(keys)}) == 2
        assert client.generate(PROMPT, greedy, timeout=LIMIT_S).token_ids == expected


def complaint(head: str, variables: dict[str, str], keys: Path) -> str:
    """What `pagecast serve` says of a cluster that it does not use, in one line, and nothing beside it."""
    words = ("serve", "--executor", "oracle", "--num-blocks", "64", "--launcher", "ray", "--tensor-parallel-size", "2", "--device", "cpu")
    command = [*PAGECAST, *words, "--head", f"127.0.0.1:{free_port()}", "--wire-keys", str(keys)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables | {"RAY_ADDRESS": head}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line.removeprefix("pagecast serve: ")


@pytest.mark.ray
@needs_ray
def test_a_cluster_is_asked_whom_it_lets_in(tmp_path: Path) -> None:
    """On an address that others reach: whatever our own variables say, an open one is refused; a closed one wants the right token."""
    keys, outer, wrong = tmp_path / "keys", outer_address(), SECRETS | {"RAY_AUTH_TOKEN": "f" * 32}
    assert pagecast("keys", str(keys)).returncode == 0
    with cluster(outer, OPEN) as head:
        for variables in (OPEN, SECRETS, {}):
            assert complaint(head, variables, keys) == (
                f"refusing the Ray cluster at {head}: it lets in whoever reaches {outer}; start it with RAY_AUTH_MODE=token on every host"
            )
    with cluster(outer, SECRETS) as head:
        refused = f"the Ray cluster at {head} wants a token that is not ours"
        for variables in (OPEN, wrong, {"HOME": str(tmp_path)}):
            assert complaint(head, variables, keys).startswith(refused)
    assert complaint(head, SECRETS, keys) == f"cannot reach the Ray cluster at {head}: Connection refused"


@pytest.mark.ray
@needs_ray
def test_an_open_cluster_is_let_be_where_nobody_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    with cluster("127.0.0.1", OPEN) as head:
        assert ray_door.check(head) is False
    with cluster("127.0.0.1", SECRETS) as head:
        monkeypatch.setenv("RAY_AUTH_TOKEN", SECRETS["RAY_AUTH_TOKEN"])
        assert ray_door.check(head) is True and os.environ["RAY_AUTH_MODE"] == "token"


def test_an_open_cluster_on_hosts_that_others_reach_is_refused() -> None:
    ray_door.check_hosts("127.0.0.1:6379", ["127.0.0.1", "localhost", "::1"])
    for hosts in (["10.0.0.5"], ["127.0.0.1", "10.0.0.5"], ["head.example"]):
        with pytest.raises(LaunchError, match=f"refusing the Ray cluster at 127.0.0.1:6379: it lets in whoever reaches {hosts[-1]}"):
            ray_door.check_hosts("127.0.0.1:6379", hosts)


def test_what_is_no_cluster_is_named() -> None:
    for address in ("auto", "ray://10.0.0.5:10001", "10.0.0.5", ":6379"):
        with pytest.raises(LaunchError, match="RAY_ADDRESS must be host:port of the cluster's head, got '" + address):
            ray_door.check(address)
    closed = f"127.0.0.1:{free_port()}"
    with pytest.raises(LaunchError, match=f"cannot reach the Ray cluster at {closed}: Connection refused"):
        ray_door.check(closed)


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagecast_scheduler.launch.ray.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="needs the package ray"):
        OverRay(2, "cpu", "h:1")


@needs_ray
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="head is needed"):
        OverRay(2, "cpu", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(LaunchError, match="needs the address of a running cluster in RAY_ADDRESS"), OverRay(2, "cpu", "h:1").held():
        pass
