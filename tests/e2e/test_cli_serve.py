"""The cluster as an operator meets it: starts, says where it listens, answers, heals, and ends without a trace."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from e2e.cli_server import LIMIT_S, pagecast, serve
from e2e.launch_roles import wait_ended
from free_ports import free_port

from pagecast import Client, SamplingParams, models
from pagecast.errors import PagecastError
from pagecast.types import Tokens

ORACLE = ("--executor", "oracle")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_ends_with_nothing_left(number: signal.Signals, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serve(*ORACLE, "--run-dir", str(run_dir)) as served:
        processes = [process for role in served.children().values() for process in role]
        assert len(processes) == 3
        with Client(served.address) as client:
            result = client.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
            assert len(result.token_ids) == 8
            assert client.health() == "SERVING" and client.models()[0].name == "oracle"
        status = pagecast("status", "--target", served.address)
        assert status.returncode == 0 and "health   SERVING" in status.stdout and "model    oracle" in status.stdout
        assert served.end(number) == 0
    assert not any(psutil.pid_exists(process.pid) and process.is_running() for process in processes)
    assert not run_dir.exists()
    assert not any("Traceback" in line or "vanished" in line for line in served.lines)


def test_the_processes_of_a_cluster_carry_only_what_they_need() -> None:
    """The scheduler has neither torch nor gRPC nor transformers in it, the front end no torch, the oracle's worker none of them."""
    with serve(*ORACLE) as served:
        with Client(served.address) as client:
            client.generate([1, 2, 3], SamplingParams(max_tokens=4))
        loaded = {role: {Path(file.path).name for file in processes[0].memory_maps()} for role, processes in served.children().items()}
    mapped = {role: " ".join(names) for role, names in loaded.items()}
    for library in ("torch", "cygrpc", "tokenizers"):
        assert library not in mapped["scheduler"] and library not in mapped["worker"]
    assert "torch" not in mapped["frontend"]
    assert "cygrpc" in mapped["frontend"]  # so the maps do tell


def test_two_front_ends_share_one_port_and_tell_their_metrics_on_two() -> None:
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    with serve(*ORACLE, "--num-frontends", "2", "--frontend-metrics-port", str(first)) as served:
        assert len(served.children()["frontend"]) == 2
        for number in (first, second):
            assert "pagecast_frontend_open_calls" in httpx.get(f"http://127.0.0.1:{number}/metrics", timeout=LIMIT_S).text
        port = int(served.address.rpartition(":")[2])
        for process in served.children()["frontend"]:
            assert port in [connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"]
        for _ in range(8):
            with Client(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as client:
                assert client.health() == "SERVING"


def test_ranks_give_the_tokens_of_one_rank() -> None:
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    answers = []
    for ranks in ("1", "2"):
        with serve(*ORACLE, "--tensor-parallel-size", ranks) as served:
            assert len(served.children()["worker"]) == int(ranks)
            with Client(served.address) as client:
                answers.append(client.generate([5, 6, 7], sampling).token_ids)
    assert answers[0] == answers[1]


def test_a_stream_survives_the_death_of_its_worker() -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
    with serve(*ORACLE, "--oracle-step-us", "10000") as served, Client(served.address) as client:
        expected = client.generate([5, 6, 7], sampling).token_ids
        got: list[int] = []
        killed = False
        for event in client.stream([5, 6, 7], sampling):
            if isinstance(event, Tokens):
                assert event.first_token_offset == len(got)
                got += event.token_ids
            if len(got) >= 20 and not killed:
                killed = True
                served.children()["worker"][0].send_signal(signal.SIGKILL)
        assert tuple(got) == expected
        assert client.load().num_recoveries >= 1
    assert any('"worker-0"' in line and '"process ended"' in line for line in served.lines)


def test_a_killed_front_end_comes_back_where_it_was() -> None:
    with serve(*ORACLE) as served:
        port = int(served.address.rpartition(":")[2])
        first = served.children()["frontend"][0]
        first.kill()
        first.wait(timeout=60)
        until = time.monotonic() + 60
        while True:
            try:
                with Client(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as client:
                    if client.health(timeout=5) == "SERVING":
                        break
            except PagecastError:
                assert time.monotonic() < until
                time.sleep(0.1)
        (second,) = served.children()["frontend"]
        assert second.pid != first.pid
        assert port in [connection.laddr.port for connection in second.net_connections("tcp") if connection.status == "LISTEN"]


def test_nothing_outlives_a_killed_supervisor() -> None:
    with serve(*ORACLE) as served:
        processes = [process.pid for role in served.children().values() for process in role]
        assert len(processes) == 3
        served.process.kill()
        wait_ended(processes)


def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = pagecast("serve", *ORACLE, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("the port is in use") and len(done.stderr.splitlines()) == 1


def test_a_run_directory_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with serve(*ORACLE, "--run-dir", str(tmp_path / "run")):
        done = pagecast("serve", *ORACLE, "--port", "0", "--run-dir", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "is in use by process" in done.stderr and len(done.stderr.splitlines()) == 1


def test_files_that_are_no_model_are_said_in_one_line(tmp_path: Path) -> None:
    garbage, text, folder = tmp_path / "garbage.gguf", tmp_path / "notes.txt", tmp_path / "empty"
    garbage.write_bytes(b"nothing of the kind")
    text.write_text("hello")
    folder.mkdir()
    for path, said in ((garbage, "is not in GGUF format"), (text, "only .gguf files are taken"), (folder, "has no config.json")):
        done = pagecast("serve", str(path))
        assert done.returncode == 2
        assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_damaged_model_is_said_at_the_end(tmp_path: Path) -> None:
    """Where its head is whole, it is a process that finds it."""
    damaged = tmp_path / "damaged.gguf"
    whole = models.resolve(models.DEFAULT_MODEL)
    with whole.open("rb") as file:
        damaged.write_bytes(file.read(whole.stat().st_size // 2))
    done = pagecast("serve", str(damaged), "--port", "0")
    assert done.returncode == 2
    complaints = [line for line in done.stderr.splitlines() if line.startswith("pagecast serve: ")]
    assert len(complaints) == 1 and "worker-0 failed: " in complaints[0], done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_head_is_said_before_the_start(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(64))
    done = pagecast("serve", str(damaged), "--port", "0")
    assert (done.returncode, done.stderr) == (2, f"pagecast serve: {damaged}: not a readable GGUF file (GGUF version 0 is not supported)\n")


def test_the_scheduler_loads_no_heavy_module(tmp_path: Path) -> None:
    """In the interpreter itself: importing any of them is made to fail, and the role starts and ends all the same."""
    banned = ("torch", "grpc", "transformers", "triton", "tokenizers", "google", "rich")
    code = (
        "import sys\n"
        f"for name in {banned!r}: sys.modules[name] = None\n"
        "from pagecast_scheduler.engine import loop\n"
        "from pagecast.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run_dir = tmp_path / "r"
    run_dir.mkdir(mode=0o700)
    words = ["scheduler", "--run-dir", str(run_dir), "--log-format", "json"]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # ends with the process, if it does not start
            said.append(line)
            if "scheduler started" in line:
                process.terminate()
        assert process.wait(LIMIT_S) == 0 and "scheduler started" in "".join(said), said
    finally:
        process.kill()
        process.communicate()

