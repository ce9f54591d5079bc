"""The static launcher on two hosts, their link under CURVE: a model split over them serves and heals; what does not fit is one line."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.cli_server import LIMIT_S, PAGECAST, pagecast
from e2e.two_hosts import Host, two_hosts
from free_ports import free_port
from worker.tiny_model import write_config

from pagecast import LLM, Client, SamplingParams
from pagecast_scheduler.launch.launcher import Static
from pagecast_scheduler.launch.process import RoleSpec
from pagecast_scheduler.launch.run_dir import LaunchError

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = list(range(40, 60))

pytestmark = pytest.mark.timeout(600)


class Node:
    """`pagecast serve` on one host. What it writes is in lines."""

    def __init__(self, host: Host, *words: str) -> None:
        command = [*host.prefix, *PAGECAST, "serve", "--launcher", "static", "--nnodes", "2", "--tensor-parallel-size", "2", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self.serves = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("serving "):
                self.serves.set()
        self.serves.set()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(timeout=LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def wait_said(self, text: str) -> None:
        """Until a line holds this text."""
        end = time.monotonic() + LIMIT_S
        while not any(text in line for line in self.lines.copy()):
            assert time.monotonic() < end and self.process.poll() is None, "".join(self.lines)
            time.sleep(0.1)

    def last(self) -> str:
        return self.lines[-1].strip() if self.lines else ""

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ours"
    assert pagecast("keys", str(folder)).returncode == 0
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert pagecast("keys", str(folder)).returncode == 2  # a key is never replaced
    return folder


@contextmanager
def head_node(hosts: tuple[Host, Host], keys: Path, folder: Path, *words: str) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """Host 0, and the words that host 1 needs to be its other half."""
    common = ("--head", f"{hosts[0].address}:{free_port()}", "--wire-keys", str(keys), *words)
    with Node(hosts[0], *common, "--port", "0", "--uds", str(folder / "grpc.sock"), "--drain-announce-s", "0") as head:
        yield head, (*common, "--node-rank", "1")


def test_a_model_over_two_hosts_serves_and_heals(hosts: tuple[Host, Host], keys: Path, tmp_path: Path) -> None:
    shape = write_config(tmp_path / "shape")
    options = {"random_weights": str(shape), "dtype": "float32", "num_blocks": 64, "max_num_seqs": 4}
    with LLM(**options) as alone:
        expected = alone.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    words = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with head_node(hosts, keys, tmp_path, *words) as (head, rest):
        with Node(hosts[1], *rest) as other:
            assert head.serves.wait(LIMIT_S) and head.process.poll() is None, "".join(head.lines)
            assert other.serves.wait(LIMIT_S) and "with the scheduler at" in other.last()
            with Client(f"unix:{tmp_path}/grpc.sock") as client:
                assert client.generate(PROMPT, GREEDY).token_ids == expected
        with Client(f"unix:{tmp_path}/grpc.sock") as client:  # the other host has gone, and comes back
            answers: list[tuple[int, ...]] = []
            thread = threading.Thread(target=lambda: answers.append(client.generate(PROMPT, GREEDY, timeout=LIMIT_S).token_ids))
            with Node(hosts[1], *rest):
                end = time.monotonic() + LIMIT_S
                while client.load().state != "serving" or client.load().epoch < 2:
                    assert time.monotonic() < end, "".join(head.lines[-20:])
                    time.sleep(0.2)
                thread.start()
                thread.join(LIMIT_S)
            assert answers == [expected]


OTHER_BUILD = """
import sys
from pagecast_wire import codec
codec.WIRE_DIGEST = "feedfeedfeedfeed"
from pagecast_worker.config import WorkerConfig
from pagecast_worker.main import run
sys.exit(run(WorkerConfig(sys.argv[1], "oracle", 1, 2, head=sys.argv[2], wire_keys=sys.argv[3], executor="oracle")))
"""


def test_what_does_not_fit_is_one_line_and_an_exit_code(hosts: tuple[Host, Host], keys: Path, tmp_path: Path) -> None:
    """Host 0 waits for rank 1; whoever is not the right one is told why, and the right one is still welcome."""
    others, stranger = tmp_path / "others", tmp_path / "stranger"
    assert pagecast("keys", str(others)).returncode == 0
    stranger.mkdir()
    own, theirs = ((folder / "rank.key").read_text() for folder in (keys, others))
    scheduler = own.split('"scheduler":')[1]
    (stranger / "rank.key").write_text(theirs.split('"scheduler":')[0] + '"scheduler":' + scheduler)
    with head_node(hosts, keys, tmp_path, "--executor", "oracle", "--num-blocks", "64") as (head, rest):
        head.wait_said("rank joined")  # or what the wrong one says would be believed
        for words, line in (
            (("--wire-keys", str(others)), f"has other keys than {others}, or none"),
            (("--wire-keys", str(stranger)), f"does not know the key in {stranger}"),
            (("--oracle-vocab-size", "77"), "refused by the scheduler: model digest"),
            (("--max-num-seqs", "3"), "refused by the scheduler: config digest"),
            (("--tensor-parallel-size", "4"), "refused by the scheduler: --tensor-parallel-size 4, the scheduler has 2"),
        ):
            with Node(hosts[1], *rest, *words) as wrong:
                assert wrong.wait() == 2
                (complaint,) = [words for words in wrong.lines if words.startswith("pagecast serve: ")]
                assert line in complaint
        build = [*hosts[1].prefix, sys.executable, "-c", OTHER_BUILD, str(tmp_path), rest[1], str(keys)]
        done = subprocess.run(build, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 2 and "refused by the scheduler: wire digest feedfeedfeedfeed" in done.stderr.strip().splitlines()[-1]
        with Node(hosts[1], *rest):
            assert head.serves.wait(LIMIT_S) and head.process.poll() is None, "".join(head.lines)


def test_a_host_that_never_comes_is_named(hosts: tuple[Host, Host], keys: Path, tmp_path: Path) -> None:
    with head_node(hosts, keys, tmp_path, "--executor", "oracle", "--num-blocks", "64", "--rank-timeout-s", "15") as (head, _):
        assert head.wait() == 1  # rank 0 is there long before that, on however busy a machine
        assert any("scheduler" in line and "no worker for rank 1 of 2 within 15 s" in line for line in head.lines), "".join(head.lines)


def test_no_link_between_hosts_without_keys() -> None:
    words = ("serve", "--executor", "oracle", "--port", "0", "--launcher", "static", "--nnodes", "2", "--tensor-parallel-size", "2")
    refused = pagecast(*words, "--head", "127.0.0.1:29499")
    assert refused.returncode == 2 and "refusing to listen on 127.0.0.1:29499 without keys" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    refused = pagecast(*words)
    assert refused.returncode == 2 and "head is needed" in refused.stderr


def test_every_host_gets_its_share() -> None:
    specs = [RoleSpec("scheduler", []), *(RoleSpec("worker", [], rank) for rank in range(4)), RoleSpec("frontend", [])]
    names = [[spec.name for spec in Static(2, node, "h:1").placed(specs)] for node in range(2)]
    assert names == [["scheduler", "worker-0", "worker-1", "frontend-0"], ["worker-2", "worker-3"]]
    with pytest.raises(LaunchError, match="nnodes must divide tensor_parallel_size, got 3 for 4"):
        Static(3, 0, "h:1").placed(specs)
    with pytest.raises(LaunchError, match="node_rank must be below nnodes 2, not 2"):
        Static(2, 2, "h:1")
