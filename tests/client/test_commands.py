"""The client commands as processes: what they print, how they end, and what Ctrl-C does."""

import json
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import fsdecode, fsencode
from pathlib import Path

import grpc
import pytest
from client.fake_server import FakeServer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagecast.admin import open_request
from pagecast.cli.admin import ACTIONS, line_of
from pagecast.cli.answer import Answer
from pagecast.cli.main import COMMANDS
from pagecast.v1 import admin_pb2, generation_pb2

PAGECAST = [sys.executable, "-m", "pagecast.cli.main"]


def pagecast(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PAGECAST, *words], capture_output=True, text=True, input=stdin, timeout=120)


def test_generate_streams_to_standard_output_and_figures_to_standard_error(server: FakeServer) -> None:
    done = pagecast("generate", "hello", "--target", server.target, "--max-tokens", "3", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert (done.returncode, done.stdout) == (0, "ab\n")
    assert "2 tokens" in done.stderr and "ended by stop" in done.stderr
    (asked,) = server.script.asked
    assert (asked.prompt_text, asked.stopping.max_output_tokens, list(asked.stopping.stop_texts)) == ("hello", 3, ["a", "b"])
    done = pagecast("generate", "-", "--chat", "--quiet", "--target", server.target, stdin="from a pipe")
    assert (done.returncode, done.stderr) == (0, "")
    assert server.script.asked[1].chat.messages[0].content == "from a pipe"


@pytest.mark.parametrize(("words", "code", "said"), [
    (["generate", "bad"], 1, "must be at most 100, not 101"),
    (["generate", "x", "--max-tokens", "-1"], 2, "argument --max-tokens: must be at least 1, not -1"),
    (["generate", "x", "--timeout", "-1"], 2, "must be more than 0 seconds, not -1"),
    (["generate", "x", "--timeout", "soon"], 2, "must be a number of seconds, not 'soon'"),
    (["status", "--rank", "0"], 2, "--rank needs --run-dir"),
    (["status", "--head", "127.0.0.1:x"], 2, "--head must be HOST:PORT, not '127.0.0.1:x'"),
    (["token", "x", "--days", "many"], 2, "must be a number of days, not 'many'"),
    (["conformance", "--timeout", "1"], 2, "unrecognized arguments: --timeout 1"),
    (["conformance", "--schemas", "0"], 2, "argument --schemas: must be at least 1, not 0"),
    (["conformance", "--json", "/no/such/file"], 2, "cannot write /no/such/file: No such file or directory"),
    (["admin", "cancel"], 2, "cancel takes request ids, or --all"),
    (["admin", "drain", "--all"], 2, "--all is for cancel, without request ids"),
    (["admin", "check", "--run-dir", "/no/such"], 2, "/no/such has no operators' socket: no cluster runs there"),
    (["admin", "requests"], 2, "has no methods for operators"),
    (["generate", "endless", "--timeout", "0.5"], 1, "the call's timeout ran out"),
    (["generate"], 2, "required: PROMPT"),
    (["status", ""], 2, "unrecognized arguments: ; see"),
    (["batch", ""], 2, "cannot read .: Is a directory"),
    (["generate", "x", "--no-such"], 2, "unrecognized arguments: --no-such; see"),
    (["generate", "x", "--max-token=3"], 2, "unrecognized arguments: --max-token=3; did you mean --max-tokens?; see"),
    (["no-such"], 2, "no command 'no-such'; see"),
    (["stats"], 2, "no command 'stats'; did you mean status?; see"),
    (["status", "--target", "127.0.0.1:1"], 1, "Connection refused (`pagecast serve` starts a server)"),
    (["serve", "--max-num-seqs", "many"], 2, "argument --max-num-seqs: must be a whole number, not 'many'"),
    (["serve", "--max-num-seqs", "0"], 2, "--max-num-seqs must be at least 1"),
    (["serve", "--dtype", "float8"], 2, "invalid choice: 'float8'"),
    (["serve", "--batch-delay-ms", "11"], 2, "--batch-delay-ms must be between 0 and 10"),
    (["serve", "--executor", "oracle", "--nnodes", "2"], 2, "--nnodes 2 needs --launcher static; the launcher is local"),
    (["serve", "--executor", "oracle", "--node-rank", "1"], 2, "--node-rank 1 needs --launcher static and --nnodes"),
    (["serve", "--executor", "oracle", "--launcher", "static"], 2, "--launcher static needs --nnodes of at least 2 and --head"),
    (["serve", "--executor", "oracle", "--insecure-wire"], 2, "--insecure-wire needs --head"),
    (["serve", "--executor", "oracle", "--record-tokens"], 2, "--record-tokens needs --record"),
    (["bench", "kernels", "--tensor-parallel-size", "0"], 2, "argument --tensor-parallel-size: must be at least 1, not 0"),
    (["worker", "--executor", "oracle", "--run-dir", "/no/such"], 2, "the run directory /no/such does not exist"),
    (["frontend", "--model", "", "--port", "0", "--run-dir", "/no/such"], 2, "cannot use the run directory /no/such: No such file"),
    (["bench", "throughput", "--set", "foo=1"], 2, "argument --set: must be an option of serve, = and its value, not 'foo=1'"),
    (["bench", "throughput", "--set", "max_num_seqs=x"], 2, "argument --set: max_num_seqs must be a whole number, not 'x'"),
    (["bench", "throughput", "--peer-only"], 2, "need --peer"),
    (["bench", "startup", "--random-weights", "x"], 2, "invalid choice: 'x'"),
    (["bench", "startup", "--checkpoint", "x"], 2, "--checkpoint needs --random-weights"),
    (["bench", "serve", "--target", "127.0.0.1:1", "--results", "/proc/x"], 2, "cannot write results to /proc/x"),
    (["bench", "serve", "--target", "127.0.0.1:1", "--results", "/tmp"], 1, "Connection refused"),
    (["bench", "scheduler", "--nano-vllm", "/no/such"], 2, "is no checkout of nano-vllm"),
    (["bench", "kernels", "--parts", "decode,x"], 2, "argument --parts: must be of decode, prefill"),
    (["bench", "kernels", "--exhaustive"], 2, "--exhaustive: says how to tune"),
    (["bench", "kernels", "--in-step"], 2, "--in-step: says how to tune"),
    (["bench", "report", "--targets", "/no/such"], 2, "cannot read /no/such: No such file or directory"),
    (["serve", "--random-weights", "/no/such"], 2, "random weights are made for the config.json of a folder, and '/no/such' has none"),
    (["gateway", "--target", "localhost", "--http-port", "0"], 2, "an endpoint is HOST:PORT or unix:PATH, not 'localhost'"),
    (["serve", "--executor", "oracle", "--served-model-name", ""], 2, "--served-model-name must not be empty"),
    (["serve", "--executor", "oracle", "--uds", ""], 2, "--uds must not be empty"),
    (["serve", "--executor", "oracle", "--uds", fsdecode(b"/tmp/a\xff")], 2, r"--uds must be a path in UTF-8, not '/tmp/a\udcff'"),
    (["serve", "--executor", "oracle", "--port", "0", "--run-dir", fsdecode(b"/tmp/a\xff")], 2, "run directory must be a path in UTF-8"),
    (["status", "--target", fsdecode(b"unix:a\xff")], 2, r"an endpoint must be text in UTF-8, not 'unix:a\udcff'"),
    (["keys", ""], 2, "FOLDER must not be empty"),
    (["serve", "--executor", "oracle", "--num-blocks", "2147483647"], 2, "--num-blocks must be at least 2"),
    (["serve", "--executor", "oracle", "--max-connections", "2147483647"], 2, "--max-connections must be at least 1 and at most"),
    (["serve", "--executor", "oracle", "--max-message-bytes", "2147483647"], 2, "--max-message-bytes must be 4096 to"),
    (["perplexity", "smollm2-135m", "-", "--window", "1"], 2, "argument --window: must be at least 2, not 1"),
    (["serve", "/no/such/model"], 2, "no model '/no/such/model'"),
    (["serve", "--executor", "oracle", "--host", "0.0.0.0"], 2, "--insecure"),
    (["bench"], 2, "name what to measure"),
])
def test_what_is_wrong_is_said_in_one_line(server: FakeServer, words: list[str], code: int, said: str) -> None:
    target = ["--target", server.target] if words[0] in ("generate", "admin") else []
    done = pagecast(*words, *target)
    assert done.returncode == code
    assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("pagecast") and not done.stdout.startswith("\n")


def test_keys_go_into_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / fsdecode(b"keys \xff")
    environment = {"LC_ALL": "C.UTF-8", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([*PAGECAST, "keys", str(folder)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(fsencode(folder).decode(errors="replace")), done.stderr
    assert {file.name for file in folder.iterdir()} == {"scheduler.key", "rank.key"}


def test_keys_that_a_full_disk_cuts_off_are_not_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    folder, command = tmp_path / "keys", [*PAGECAST, "keys", str(tmp_path / "keys")]
    few = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (64, 64))  # bytes that a file may have
    full = subprocess.run(command, capture_output=True, text=True, preexec_fn=few, timeout=120)
    assert full.returncode == 2 and "cannot write to" in full.stderr and list(folder.iterdir()) == []
    assert pagecast("keys", str(folder)).returncode == 0 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("words", [["generate", "hello"], ["models"], ["version"], ["--help"], []])
def test_output_that_its_disk_does_not_take_is_told_in_one_line(server: FakeServer, words: list[str]) -> None:
    name = "pagecast" if words in (["--help"], []) else f"pagecast {words[0]}"
    target = ["--target", server.target] if words[:1] in (["generate"], ["models"]) else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PAGECAST, *words, *target], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, f"{name}: cannot write: No space left on device\n")


def test_the_rate_leaves_out_every_token_of_the_first_message() -> None:
    assert Answer(num_tokens=9, num_first=5, first_token=0.25, total=2.25, reason="stop").summary() == (
        "9 tokens, first after 250 ms, 2.0 tokens/s, ended by stop"
    )
    assert "tokens/s" not in Answer(num_tokens=5, num_first=5, first_token=0.25, total=0.26).summary()
    assert Answer(total=1.0).summary() == "no tokens, ended by interrupt"


def test_every_action_of_admin_has_a_line_of_the_help() -> None:
    lines = pagecast("admin", "--help").stdout.splitlines()
    start = lines.index("actions:") + 1
    assert [line.split()[0] for line in lines[start:]] == list(ACTIONS)


def test_a_request_that_decodes_has_no_more_of_its_prompt_than_there_is() -> None:
    info = admin_pb2.RequestInfo(
        request_id="r", priority=generation_pb2.PRIORITY_NORMAL, phase=generation_pb2.PHASE_DECODING, prompt_tokens=2, computed_tokens=49,
        output_tokens=48,
    )
    assert line_of(open_request(info)) == "r  decoding  0.0 s  2/2 prompt, 48 output"


def test_status_shows_health_model_and_load(server: FakeServer) -> None:
    done = pagecast("status", "--target", server.target)
    assert done.returncode == 0
    assert "SERVING" in done.stdout and "model    m:" in done.stdout and "4 running" in done.stdout
    # The step is one of the epoch, the other figures are of the scheduler's life.
    assert "epoch 2, step 9\n" in done.stdout and "11 prompt and 12 output tokens in 0.5 s of the device," in done.stdout
    told = json.loads(pagecast("status", "--json", "--target", server.target).stdout)
    assert (told["health"], told["load"]["num_running"], told["models"][0]["limits"]["max_model_len"]) == ("SERVING", 4, 128)
    assert pagecast("status", "--check", "--target", "127.0.0.1:1").returncode == 1


def test_chat_keeps_the_history(server: FakeServer) -> None:
    done = pagecast("chat", "--system", "be brief", "--target", server.target, stdin="one\n\ntwo\n/exit\nthree\n")
    assert (done.returncode, done.stdout) == (0, "ab\nab\n")
    assert [[(m.role, m.content) for m in asked.chat.messages] for asked in server.script.asked] == [
        [("system", "be brief"), ("user", "one")],
        [("system", "be brief"), ("user", "one"), ("assistant", "ab"), ("user", "two")],
    ]


def test_chat_says_what_a_flag_cannot_hold(server: FakeServer) -> None:
    done = pagecast("chat", "--seed", "-1", "--target", server.target, stdin="one\n")
    assert done.returncode == 2 and "argument --seed: must be at least 0, not -1" in done.stderr


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(server: FakeServer) -> None:
    process = subprocess.Popen(
        [*PAGECAST, "chat", "--target", server.target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=0
    )
    assert process.stdin and process.stdout
    process.stdin.write("endless\n")
    assert process.stdout.read(1) == "x"
    process.send_signal(signal.SIGINT)
    assert server.script.cancelled.wait(60)
    process.stdin.write("hello\n/exit\n")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.endswith("\nab\n")
    last = [(m.role, m.content) for m in server.script.asked[-1].chat.messages]
    assert last[1][0] == "assistant" and set(last[1][1]) == {"x"} and last[2] == ("user", "hello")


def test_ctrl_c_ends_generate_and_cancels_it(server: FakeServer) -> None:
    process = subprocess.Popen([*PAGECAST, "generate", "endless", "--target", server.target], stdout=subprocess.PIPE, text=True, bufsize=0)
    assert process.stdout and process.stdout.read(1) == "x"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert server.script.cancelled.wait(60)


def test_a_reader_that_goes_away_ends_the_command(server: FakeServer) -> None:
    process = subprocess.Popen(
        [*PAGECAST, "generate", "endless", "--target", server.target], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    )
    assert process.stdout and process.stderr and process.stdout.read(1) == "x"
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_version_and_help_name_everything() -> None:
    assert pagecast("version").stdout.startswith("pagecast 0.1.0")
    assert pagecast("--version").stdout == pagecast("version").stdout
    overview = pagecast("--help")
    assert overview.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in overview.stdout
    assert pagecast().returncode == 2


def test_status_says_of_a_port_for_health_checks_that_it_is_one() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        done = pagecast("status", "--target", target)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"pagecast status: {target} is SERVING and answers nothing but health; --check asks for no more\n"
    finally:
        server.stop(None)
