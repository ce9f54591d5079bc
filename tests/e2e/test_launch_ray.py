"""Ranks over a Ray cluster of two nodes on this host: placed there, watched there, started again, and ended with the cluster.

The cluster takes its time to start, so `make ray` runs what needs one, and `make test` the rest.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from e2e.cli_server import LIMIT_S, pagecast, serve
from free_ports import free_port

from pagecast import Client, SamplingParams
from pagecast_scheduler.launch.ray import OverRay, check_address
from pagecast_scheduler.launch.run_dir import LaunchError
from pagecast_worker.oracle import oracle_tokens

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")
pytestmark = pytest.mark.timeout(600)

PROMPT = list(range(300, 320))


SECRETS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2, "RAY_USAGE_STATS_ENABLED": "0"}
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two nodes with one processor each, so that two ranks need both; it knows its users by a token."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | SECRETS,
    )
    assert process.stdout and process.stdin
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("address "))
    finally:
        process.stdin.close()
        process.wait(timeout=LIMIT_S)


def ranks() -> list[psutil.Process]:
    """Rank processes of this user, wherever Ray started them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_rank = "pagecast.cli.main" in words and words[words.index("pagecast.cli.main") + 1] == "worker"
        if is_rank and "pagecast_scheduler.launch.ray" not in words:
            found.append(process)
    return found


@pytest.mark.ray
@needs_ray
def test_ranks_run_in_the_cluster_and_heal(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    before = {process.pid for process in ranks()}
    assert pagecast("keys", str(tmp_path / "keys")).returncode == 0
    words = ["--executor", "oracle", "--num-blocks", "64", "--launcher", "ray", "--tensor-parallel-size", "2", "--oracle-step-us", "20000"]
    words += ["--head", f"127.0.0.1:{free_port()}", "--wire-keys", str(tmp_path / "keys"), "--device", "cpu"]
    with serve(*words) as served:
        mine = [process for process in ranks() if process.pid not in before]
        assert len(mine) == 2 and len({process.ppid() for process in mine}) == 2  # an actor each
        with Client(served.address) as client:
            sampling, answers = SamplingParams(seed=3, max_tokens=200, ignore_eos=True), []
            thread = threading.Thread(target=lambda: answers.append(client.generate(PROMPT, sampling, timeout=LIMIT_S).token_ids))
            thread.start()
            os.kill(mine[0].pid, signal.SIGKILL)
            thread.join(LIMIT_S)
            assert answers == [tuple(oracle_tokens(PROMPT, 200, seed=3))]
        assert served.end() == 0
    psutil.wait_procs([process for process in ranks() if process.pid not in before], timeout=30)
    assert not [process for process in ranks() if process.pid not in before]


def test_a_cluster_that_anybody_may_use_is_refused() -> None:
    check_address("127.0.0.1:6379", authenticated=False)
    check_address("ray://10.0.0.5:10001", authenticated=True)
    for address in ("10.0.0.5:6379", "ray://10.0.0.5:10001", "head.example:6379"):
        with pytest.raises(LaunchError, match=f"refusing the Ray cluster at {address}: it authenticates nobody"):
            check_address(address, authenticated=False)


@needs_ray
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="head is needed"):
        OverRay(2, "cpu", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(LaunchError, match="needs the address of a running cluster in RAY_ADDRESS"), OverRay(2, "cpu", "h:1").held():
        pass
