"""docker-compose.yml: valid by the Compose schema, locked down, and its commands do run and heal as processes."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from e2e.cli_server import LIMIT_S, PAGECAST
from free_ports import free_port

from pagecast import Client, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]


def schema_check(content: dict[str, Any]) -> None:
    """Raises ValueError, naming the key, where the content breaks the Compose specification. Anchors are already resolved."""
    PyCompose.from_yaml(yaml.safe_dump({key: value for key, value in content.items() if not key.startswith("x-")}))


@pytest.mark.parametrize("path", [FILE, *sorted((ROOT / "deploy").glob("docker-compose.*.yml"))], ids=lambda path: path.name)
def test_the_file_follows_the_compose_schema(path: Path) -> None:
    schema_check(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("wrong", [{"no_such_key": 1}, {"read_only": "perhaps"}, {"healthcheck": {"intervall": "5s"}}])
def test_the_schema_check_can_fail(wrong: dict[str, Any]) -> None:
    content = yaml.safe_load(FILE.read_text())
    content["services"]["worker"].update(wrong)
    with pytest.raises(ValueError, match=next(iter(wrong)) + "|intervall"):
        schema_check(content)


def test_every_role_is_locked_down_watched_and_restarted() -> None:
    assert set(SERVICES) == {"scheduler", "worker", "frontend"}
    for service in SERVICES.values():
        assert service["user"] == "10001:10001" and service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][:2] == ["CMD", "pagecast"]
        assert "run:/run/pagecast" in service["volumes"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["frontend"]["ports"])
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "deploy/Dockerfile").read_text(), re.M)
    assert {service["build"]["target"] for service in SERVICES.values()} <= set(stages)
    assert (ROOT / "deploy/Dockerfile").read_text().count("USER 10001:10001") == 3


def test_ranks_have_a_network_and_keys_of_their_own() -> None:
    content = yaml.safe_load((ROOT / "deploy/docker-compose.ranks.yml").read_text())
    services = content["services"]
    assert set(services) == {"scheduler", "worker-0", "worker-1", "frontend"} and content["networks"] == {"ranks": {"internal": True}}
    for name, service in services.items():
        assert service["user"] == "10001:10001" and service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["restart"] == "unless-stopped" and service["healthcheck"]["test"][:2] == ["CMD", "pagecast"]
        assert name == "scheduler" or service["depends_on"] == {"scheduler": {"condition": "service_healthy"}}
    secrets = {name: [secret["source"] for secret in service.get("secrets", ())] for name, service in services.items()}
    assert secrets == {"scheduler": ["scheduler_key"], "worker-0": ["rank_key"], "worker-1": ["rank_key"], "frontend": []}
    assert [services[f"worker-{rank}"]["command"][4] for rank in range(2)] == ["0", "1"]


@pytest.mark.timeout(600)
def test_the_commands_of_the_ranks_serve_as_processes(tmp_path: Path) -> None:
    """With the oracle, on this host's loopback, as compose would start them."""
    services = yaml.safe_load((ROOT / "deploy/docker-compose.ranks.yml").read_text())["services"]
    head = f"127.0.0.1:{free_port()}"
    keys, oracle = tmp_path / "keys", ["--executor", "oracle", "--num-blocks", "64"]
    assert subprocess.run([*PAGECAST, "keys", str(keys)], capture_output=True, timeout=LIMIT_S).returncode == 0
    extra = {"worker-0": oracle, "worker-1": oracle, "scheduler": [], "frontend": ["--port", "0", "--drain-announce-s", "0"]}
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, service in services.items():
            folder = tmp_path / (name if name.startswith("worker") else "run")
            folder.mkdir(mode=0o700, exist_ok=True)
            words = [re.sub(r"\$\{PAGECAST_MODEL.*\}", "", word).replace("/run/pagecast", str(folder)) for word in service["command"]]
            places = {"PAGECAST_HEAD": head, "PAGECAST_WIRE_KEYS": str(keys)}
            given = {key: places.get(key, value) for key, value in service.get("environment", {}).items()}
            running[name] = subprocess.Popen([*PAGECAST, *words, *extra[name]], env=os.environ | given)
        address, end = tmp_path / "run/frontend-0.address", time.monotonic() + 2 * LIMIT_S
        while not (address.exists() and (tmp_path / "run/frontend-0.serving").exists()):
            assert time.monotonic() < end and all(process.poll() is None for process in running.values())
            time.sleep(0.1)
        check = services["worker-0"]["healthcheck"]["test"][2:-1]
        assert subprocess.run([*PAGECAST, *check, head], capture_output=True, timeout=LIMIT_S).returncode == 0
        assert subprocess.run([*PAGECAST, *check, "127.0.0.1:1"], capture_output=True, timeout=LIMIT_S).returncode == 1
        with Client("127.0.0.1:" + address.read_text().strip().rpartition(":")[2]) as client:
            assert len(client.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).token_ids) == 8
    finally:
        for process in running.values():
            process.kill()
            process.wait()


class Host:
    """Runs the services' commands on this host, as compose would in containers: run directory and port are put in their place."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._logs = run_dir.parent
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        words = [self._here(word) for word in SERVICES[name]["command"]]
        extra = ["--port", "0", "--drain-announce-s", "0"] if name == "frontend" else []
        with (self._logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen([*PAGECAST, *words, *extra], stdout=log, stderr=log)

    def healthy(self, name: str) -> bool:
        _, _, *words = SERVICES[name]["healthcheck"]["test"]
        address = self._run_dir / "frontend-0.address"
        port = address.read_text().strip().rpartition(":")[2] if address.exists() else "1"
        words = [self._here(word).replace("50051", port) for word in words]
        return subprocess.run([*PAGECAST, *words], capture_output=True, timeout=LIMIT_S).returncode == 0

    def wait_healthy(self, name: str) -> None:
        end = time.monotonic() + 2 * LIMIT_S
        while not self.healthy(name):
            assert time.monotonic() < end and self.running[name].poll() is None, (self._logs / f"{name}.log").read_text()
            time.sleep(0.2)

    def target(self) -> str:
        return "127.0.0.1:" + (self._run_dir / "frontend-0.address").read_text().strip().rpartition(":")[2]

    def _here(self, word: str) -> str:
        return re.sub(r"\$\{\w+:-(.*)\}", r"\1", word).replace("/run/pagecast", str(self._run_dir))


@contextmanager
def host(run_dir: Path) -> Iterator[Host]:
    run_dir.mkdir(mode=0o700)
    here = Host(run_dir)
    try:
        yield here
    finally:
        for process in here.running.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(600)
def test_its_commands_serve_and_heal_as_processes(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=8)
    with host(tmp_path / "run") as here:
        here.start("scheduler")
        here.wait_healthy("scheduler")
        here.start("worker")
        here.start("frontend")
        here.wait_healthy("frontend")
        assert here.healthy("worker")
        with Client(here.target()) as client:
            expected = client.generate("The capital of France is", sampling).token_ids
        for victim in ("worker", "scheduler"):
            here.running[victim].kill()
            here.running[victim].wait()
            here.start(victim)  # what the restart policy does
            here.wait_healthy(victim)
            with Client(here.target()) as client:
                end = time.monotonic() + 2 * LIMIT_S
                while client.load().state != "serving" or client.health() != "SERVING":
                    assert time.monotonic() < end
                    time.sleep(0.2)
                assert client.generate("The capital of France is", sampling, timeout=LIMIT_S).token_ids == expected
        for name in ("frontend", "scheduler", "worker"):
            here.running[name].send_signal(signal.SIGTERM)
        assert {name: process.wait(timeout=LIMIT_S) for name, process in here.running.items()} == dict.fromkeys(here.running, 0)
