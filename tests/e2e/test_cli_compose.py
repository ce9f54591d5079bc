"""docker-compose.yml: valid by the Compose schema, locked down, and its commands do run and heal as processes, in both shapes.

The ranks and their scheduler run in two network namespaces where this machine allows that, with the files of keys as their secrets.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from compose_spec import PyCompose
from e2e import two_hosts
from e2e.cli_server import LIMIT_S, PAGECAST
from free_ports import free_port
from worker.tiny_model import write_model, write_tokenizer

from pagecast import Client, SamplingParams
from pagecast.types import Load

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
CONTENT: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, Any] = CONTENT["services"]
ONE = ("scheduler", "worker", "frontend", "gateway")
RANKS = ("ranks-scheduler", "rank-0", "rank-1", "ranks")
OPTIONAL = ("rank-2", "ranks-gateway")
HERE = two_hosts.Host((), "127.0.0.1")
HEAD_PORT = ":29400"


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


def started_by(*names: str) -> set[str]:
    """What `docker compose up NAMES` starts: these and what they depend on; without names, what belongs to no profile."""
    found, todo = set(), list(names) or [name for name, service in SERVICES.items() if not service.get("profiles")]
    while todo:
        found.add(name := todo.pop())
        todo += SERVICES[name].get("depends_on", {})
    return found


def test_each_shape_is_one_command() -> None:
    assert started_by() == set(ONE) and started_by("ranks") == set(RANKS) and started_by("keys") == {"keys"}
    assert started_by("ranks", "rank-2") == {*RANKS, "rank-2"} and started_by("frontend") == {*ONE} - {"gateway"}
    assert started_by("ranks-gateway") == {*RANKS, "ranks-gateway"}
    assert {name: service.get("profiles", []) for name, service in SERVICES.items()} == {
        **{name: [] for name in ONE}, **{name: ["ranks"] for name in (*RANKS, *OPTIONAL)}, "keys": ["keys"],
    }


def test_every_role_is_locked_down_watched_and_restarted() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.M)
    for name, service in SERVICES.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert service["build"]["target"] in stages and service["image"] == f"pagecast-{service['build']['target']}"
        if name != "keys":  # which runs once, as root
            assert service["user"] == "10001:10001" and service["restart"] == "unless-stopped" and "cap_add" not in service
            assert service["healthcheck"]["test"][:3] == ["CMD", "pagecast", "status"]
        waits = {other: each["condition"] for other, each in service.get("depends_on", {}).items()}
        assert all(condition == ("service_healthy" if "scheduler" in other else "service_started") for other, condition in waits.items())
        assert waits or name in ("scheduler", "ranks-scheduler", "keys")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert dockerfile.count("USER 10001:10001") == 4 == len(stages) - 1


def test_a_gateway_shares_a_socket_with_its_front_end_and_nothing_else() -> None:
    for name, frontend in (("gateway", "frontend"), ("ranks-gateway", "ranks")):
        service = SERVICES[name]
        [volume] = service["volumes"]
        assert volume in SERVICES[frontend]["volumes"] and volume == f"{name}:/run/gateway"
        assert [other for other in SERVICES if volume in SERVICES[other].get("volumes", ())] == [frontend, name]
        assert "networks" not in service and service["depends_on"] == {frontend: {"condition": "service_started"}}
        assert service["ports"] == ["127.0.0.1:8000:8000"] and "secrets" not in service and "environment" not in service


def test_ranks_have_a_network_and_keys_of_their_own() -> None:
    assert CONTENT["networks"] == {"ranks": {"internal": True}}
    assert {name for name, service in SERVICES.items() if "ranks" in service.get("networks", ())} == {*RANKS, "rank-2"} - {"ranks"}
    assert all(SERVICES[name]["network_mode"] == "none" for name in ("scheduler", "worker", "keys"))
    secrets = {name: {secret["source"]: secret["target"] for secret in service.get("secrets", ())} for name, service in SERVICES.items()}
    assert {name for name, held in secrets.items() if held == {"scheduler_key": "/run/keys/scheduler.key"}} == {"ranks-scheduler"}
    assert {name for name, held in secrets.items() if held == {"rank_key": "/run/keys/rank.key"}} == {"rank-0", "rank-1", "rank-2"}
    for rank in range(3):
        assert SERVICES[f"rank-{rank}"]["command"] == SERVICES[f"rank-{rank}"]["healthcheck"]["test"][-2:] == ["--rank", str(rank)]


def test_every_worker_gets_a_gpu_of_its_own() -> None:
    over = yaml.safe_load((ROOT / "deploy/docker-compose.gpu.yml").read_text())["services"]
    ids = {name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name, service in over.items()}
    assert ids == {"worker": ["0"], "rank-0": ["0"], "rank-1": ["1"], "rank-2": ["2"]}


def test_a_worker_on_a_gpu_has_a_c_compiler_and_a_place_for_its_kernels() -> None:
    """Triton needs both: with a read-only root and no home folder it could write nowhere else, and what is in /tmp cannot be run."""
    over = yaml.safe_load((ROOT / "deploy/docker-compose.gpu.yml").read_text())
    stage = (ROOT / "deploy/Dockerfile").read_text().split(" AS worker\n")[1].split("\nFROM ")[0]
    (place,) = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)$", stage, re.M)
    assert re.search(r"apt-get install .*\bgcc libc6-dev\b", stage)
    assert re.search(rf"install -d -m 0700 -o 10001 -g 10001 {place}$", stage, re.M)
    assert over["volumes"] == {"kernels": None}
    assert {tuple(each["volumes"]) for each in over["services"].values()} == {(f"kernels:{place}",)}


class Containers:
    """Runs services' commands as processes, as compose would in containers: folders, ports and addresses are put in their place.

    hosts: the place of a service that has a network of its own. variables: the environment of `docker compose`.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, two_hosts.Host], variables: Mapping[str, str]) -> None:
        self._folder, self._hosts, self.variables = folder, hosts, dict(variables)
        self._head_port, self._http_port = f":{free_port()}", free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        service = SERVICES[name]
        words = [self._here(name, word) for word in (*service.get("entrypoint", ["pagecast"])[1:], *service["command"])]
        if words[0] in ("frontend", "gateway"):
            words += ["--drain-announce-s", "0", *(["--port", "0"] if words[0] == "frontend" else ["--http-port", str(self._http_port)])]
            self.socket(name).parent.mkdir(mode=0o700, exist_ok=True)
        given = {key: self._here(name, value) for key, value in service.get("environment", {}).items()}
        self.run_dir(name).mkdir(mode=0o700, exist_ok=True)
        with (self._folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen([*self._prefix(name), *PAGECAST, *words], stdout=log, stderr=log, env=os.environ | given)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def wait_logged(self, name: str, text: str) -> None:
        end = time.monotonic() + 2 * LIMIT_S
        while text not in self.log(name):
            assert time.monotonic() < end, "".join(self.log(other) for other in self.running)
            time.sleep(0.1)

    def heal(self, done: Callable[[Load], bool], frontend: str, *victims: str) -> None:
        """Starts again whatever ends, as the restart policy does, until these are healthy, and the cluster's load is as wanted."""
        end = time.monotonic() + 2 * LIMIT_S
        while True:
            for name, process in list(self.running.items()):
                if process.poll() is not None:
                    self.start(name)
            if all(self.healthy(name) for name in (frontend, *victims)):
                with Client(f"unix:{self.socket(frontend)}") as client:
                    if done(client.load()):
                        return
            assert time.monotonic() < end, "".join(self.log(name) for name in self.running)
            time.sleep(0.2)

    def healthy(self, name: str) -> bool:
        words = [self._here(name, word) for word in SERVICES[name]["healthcheck"]["test"][2:]]
        address = self.run_dir(name) / "frontend-0.address"
        if "--target" in words:
            words[-1] = "127.0.0.1:" + (address.read_text().strip().rpartition(":")[2] if address.exists() else "1")
        if "--url" in words:
            words[-1] = self.url
        return subprocess.run([*self._prefix(name), *PAGECAST, *words], capture_output=True, timeout=LIMIT_S).returncode == 0

    def wait_healthy(self, name: str) -> None:
        end = time.monotonic() + 2 * LIMIT_S
        while not self.healthy(name):
            assert time.monotonic() < end and self.running[name].poll() is None, self.log(name)
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://127.0.0.1:{self._http_port}"

    def socket(self, name: str) -> Path:
        """Between a front end and its gateway."""
        return self._mounted(name, "/run/gateway") / "frontend.sock"

    def run_dir(self, name: str) -> Path:
        return self._mounted(name, "/run/pagecast")

    def _mounted(self, name: str, place: str) -> Path:
        """Of a service with a volume there, the one of all that share it; else its own."""
        volumes = [volume.split(":")[0] for volume in SERVICES[name]["volumes"] if volume.endswith(f":{place}")]
        return self._folder / (volumes or [name])[0]

    def _prefix(self, name: str) -> tuple[str, ...]:
        return self._hosts.get(name, HERE).prefix

    def _here(self, name: str, word: str) -> str:
        word = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: self.variables.get(match[1]) or match[2], word)
        word = re.sub(r"^ranks-scheduler(?=:)", self._hosts.get("ranks-scheduler", HERE).address, word)
        word = word.replace("/run/keys", str(self._folder / "keys")).replace("/run/pagecast", str(self.run_dir(name)))
        word = word.replace("/run/gateway", str(self.socket(name).parent))
        return word.replace(HEAD_PORT, self._head_port)


def completion(url: str, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@contextmanager
def containers(folder: Path, hosts: Mapping[str, two_hosts.Host] | None = None, **variables: str) -> Iterator[Containers]:
    here = Containers(folder, hosts or {}, variables)
    try:
        yield here
    finally:
        for process in here.running.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(600)
def test_its_commands_serve_and_heal_as_processes(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=8)
    with containers(tmp_path) as here:
        here.start("scheduler")
        here.wait_healthy("scheduler")
        assert not here.healthy("worker") and not here.healthy("frontend") and not here.healthy("gateway")
        here.start("worker")
        here.start("gateway")
        here.wait_logged("gateway", "listening")
        assert not here.healthy("gateway")  # there is no front end yet
        here.start("frontend")
        here.wait_healthy("frontend")
        here.wait_healthy("gateway")
        assert here.healthy("worker")
        target = f"unix:{here.socket('frontend')}"
        with Client(target) as client:
            expected = client.generate("The capital of France is", sampling).token_ids
        answer = completion(here.url, "The capital of France is")
        assert tuple(answer["choices"][0]["token_ids"]) == expected and "plaintext" not in here.log("gateway")
        for victim in ("worker", "scheduler", "gateway"):
            here.kill(victim)
            here.heal(lambda load: load.state == "serving", "frontend", victim)
            with Client(target) as client:
                assert client.generate("The capital of France is", sampling, timeout=LIMIT_S).token_ids == expected
        here.kill("frontend")
        here.heal(lambda load: load.state == "serving", "frontend", "gateway")
        assert completion(here.url, "The capital of France is")["choices"] == answer["choices"]
        for name in ("gateway", "frontend", "scheduler", "worker"):
            here.running[name].send_signal(signal.SIGTERM)
        assert {name: process.wait(timeout=LIMIT_S) for name, process in here.running.items()} == dict.fromkeys(here.running, 0)


@pytest.mark.timeout(600)
def test_the_ranks_serve_and_heal_as_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model split over two ranks, one on the scheduler's host and one on another, with the keys that `docker compose run keys` makes.
    A rank with other weights of the same shape is refused first."""
    model, other = write_tokenizer(write_model(tmp_path / "model")), write_model(tmp_path / "other", seed=1)
    monkeypatch.setenv("PAGECAST_NUM_BLOCKS", "64")  # the real model's pool would be a gibibyte
    make_keys = SERVICES["keys"]["entrypoint"][-1].split(" && ")[0].split()
    assert make_keys[:2] == ["pagecast", "keys"]
    assert CONTENT["secrets"] == {f"{side}_key": {"file": f"{make_keys[2].removeprefix('/')}/{side}.key"} for side in ("scheduler", "rank")}
    assert subprocess.run([*PAGECAST, "keys", str(tmp_path / "keys")], capture_output=True, timeout=LIMIT_S).returncode == 0
    sampling = SamplingParams(seed=7, max_tokens=8, ignore_eos=True)
    with two_hosts.two_hosts() as (first, second):
        hosts = {"ranks-scheduler": first, "rank-0": first, "ranks": first, "rank-1": second}
        with containers(tmp_path, hosts, PAGECAST_MODEL=str(model)) as here:
            here.start("ranks-scheduler")
            here.wait_healthy("ranks-scheduler")
            here.start("rank-0")
            here.wait_logged("ranks-scheduler", "rank waits for the others")  # or the wrong one would be believed
            here.variables["PAGECAST_MODEL"] = str(other)
            here.start("rank-1")
            assert here.running.pop("rank-1").wait(timeout=2 * LIMIT_S) == 2
            (line,) = [line for line in here.log("rank-1").splitlines() if line.startswith("pagecast worker: ")]
            assert "refused by the scheduler: model digest" in line
            here.variables["PAGECAST_MODEL"] = str(model)
            here.start("rank-1")
            here.start("ranks")
            here.start("ranks-gateway")
            here.wait_healthy("ranks")
            here.wait_healthy("ranks-gateway")
            assert completion(here.url, "Paris")["usage"]["completion_tokens"] == 8
            assert here.healthy("rank-0") and here.healthy("rank-1") and not here.healthy("rank-2")
            with Client(f"unix:{here.socket('ranks')}") as client:
                expected = client.generate("Paris", sampling).token_ids
                assert len(expected) == 8
                here.kill("rank-1")
                here.heal(lambda load: load.state == "serving" and load.epoch >= 2, "ranks", "rank-1")
                assert client.generate("Paris", sampling, timeout=LIMIT_S).token_ids == expected
                assert client.load().num_recoveries >= 1


def test_what_a_health_check_asks_of_a_gateway(tmp_path: Path) -> None:
    """One that is not there, and what it cannot be asked with."""
    (tmp_path / "empty.pem").touch()
    for url, more, code, said in (
        ("http://127.0.0.1:1", [], 1, "NOT_SERVING\n"), ("https://127.0.0.1:1/", [], 1, "NOT_SERVING\n"),
        ("127.0.0.1:8000", [], 2, "--url must be http://HOST:PORT or https://HOST:PORT, not '127.0.0.1:8000'"),
        ("file:///etc/passwd", [], 2, "--url must be http://HOST:PORT"), ("http://h:1/v1", [], 2, "--url must be http://HOST:PORT"),
        ("https://127.0.0.1:1", ["--ca", "/nowhere"], 2, "cannot use /nowhere: No such file or directory"),
        ("https://127.0.0.1:1", ["--ca", str(tmp_path / "empty.pem")], 2, "empty.pem: "),
    ):
        done = subprocess.run([*PAGECAST, "status", "--url", url, *more], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == code and said in done.stdout + done.stderr, (url, done)
        assert len((done.stdout + done.stderr).splitlines()) == 1


def test_what_a_health_check_asks_of_one_process(tmp_path: Path) -> None:
    status = [*PAGECAST, "status", "--rank", "1"]
    asked = [*status, "--run-dir", str(tmp_path)]
    for text, code in (
        ("", 1), ("[]", 1), ('{"phase": "weights", "done": 3, "total": 3}', 1), ('{"phase": "warm-up", "done": 0, "total": 1}', 1),
        ('{"phase": "warm-up", "done": 1, "total": 1}', 0),
    ):
        (tmp_path / "worker-1.progress").write_text(text)
        done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout) == (code, f"rank 1 has {'not ' if code else ''}loaded\n"), text
    done = subprocess.run(status, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stderr == "pagecast status: --rank needs --run-dir\n"
