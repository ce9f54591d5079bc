"""The example clients of other languages against a real cluster over the oracle. Where a toolchain is missing the test says which."""

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cli_server import Served, serve

from pagecast import Client, SamplingParams
from pagecast_worker.oracle import EOS_TOKEN_ID, oracle_tokens

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENS, MOST_TOKENS, VOCAB = 40, 3000, 2048
Answer = tuple[int, str, dict[str, Any]]
Generate = Callable[..., Answer]
NO_REGISTRY = re.compile(r"^npm err\w* code (ECONN\w+|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|ERR_SOCKET_TIMEOUT|E\d{3})$", re.M | re.I)
"""What npm says where its registry is away, or does not give what it is asked for."""


def run(*words: str, folder: Path, limit_s: float = 120) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=limit_s)


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--executor", "oracle", "--oracle-vocab-size", str(VOCAB), "--oracle-step-us", "2000") as served:
        yield served


@pytest.fixture(scope="module")
def prompt(server: Served) -> tuple[int, ...]:
    """What "hello" is to the server."""
    with Client(server.address) as client:
        return client.tokenize("hello")


@pytest.fixture(scope="module")
def seed(prompt: tuple[int, ...]) -> int:
    """One under which no answer ends by itself."""
    seeds = itertools.count()
    return next(n for n in seeds if EOS_TOKEN_ID not in oracle_tokens(prompt, MOST_TOKENS, n, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def node(server: Served, seed: int) -> Generate:
    need("node", "npm")
    folder = EXAMPLES / "node"
    lock, installed = folder / "package-lock.json", folder / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        try:
            done = run("npm", "ci", "--loglevel=error", "--no-audit", "--no-fund", "--ignore-scripts", folder=folder, limit_s=300)
        except subprocess.TimeoutExpired:
            pytest.skip("npm cannot install the example's packages: its registry does not answer")
        if found := NO_REGISTRY.search(done.stderr):
            pytest.skip(f"npm cannot install the example's packages: {found[1]}")
        assert done.returncode == 0, done.stderr
    built = run("npm", "run", "build", folder=folder)
    assert built.returncode == 0, built.stdout + built.stderr

    def generate(prompt: str, tokens: int, cancel_after: int | None = None) -> Answer:
        cancel = [] if cancel_after is None else ["--cancel-after", str(cancel_after)]
        limits = ["--max-tokens", str(tokens), "--seed", str(seed)]
        done = run("node", "dist/generate.js", server.address, prompt, *limits, *cancel, folder=folder)
        return done.returncode, done.stdout, json.loads(done.stderr.splitlines()[-1])

    return generate


@pytest.fixture(scope="module")
def ruby(server: Served, seed: int, tmp_path_factory: pytest.TempPathFactory) -> Generate:
    need("ruby", "protoc", "grpc_ruby_plugin")
    folder = tmp_path_factory.mktemp("ruby")
    shutil.copy(EXAMPLES / "ruby/generate.rb", folder)
    if run("ruby", "-e", 'require "grpc"', folder=folder).returncode:
        pytest.skip("Ruby has no grpc; Debian's package is ruby-grpc")
    (folder / "lib").mkdir()
    tools = importlib.util.find_spec("grpc_tools")  # brings Google's own protos, where libprotobuf-dev is not installed
    wells = [] if tools is None or tools.origin is None else [f"-I{Path(tools.origin).parent / '_proto'}"]
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_ruby_plugin')}"
    protos = f"-I{EXAMPLES.parent / 'protos'}"
    made = run("protoc", protos, *wells, "--ruby_out=lib", "--grpc_out=lib", plugin, "pagecast/v1/generation.proto", folder=folder)
    assert made.returncode == 0, made.stderr

    def generate(prompt: str, tokens: int, cancel_after: int | None = None) -> Answer:
        cancel = [] if cancel_after is None else [str(cancel_after)]
        done = run("ruby", "generate.rb", server.address, prompt, str(tokens), str(seed), *cancel, folder=folder)
        return done.returncode, done.stdout, json.loads(done.stderr.splitlines()[-1])

    return generate


@pytest.fixture(params=["node", "ruby"])
def generate(request: pytest.FixtureRequest) -> Generate:
    made: Generate = request.getfixturevalue(request.param)
    return made


def test_it_streams_a_whole_answer(generate: Generate, prompt: tuple[int, ...], seed: int) -> None:
    code, text, seen = generate("hello", TOKENS)
    assert code == 0 and seen["code"] == "OK" and seen["requestId"]
    assert seen["events"][0] == "accepted" and seen["events"][-1] == "completed"
    assert seen["tokens"] == oracle_tokens(prompt, TOKENS, seed, vocab_size=VOCAB) and seen["finish"] == "FINISH_REASON_LENGTH"
    assert text.strip() != ""


def test_a_refusal_arrives_as_a_status_that_names_the_field(generate: Generate) -> None:
    code, text, seen = generate("hello", 0)
    assert code == 1 and seen["code"] == "INVALID_ARGUMENT" and "spec.stopping.max_output_tokens" in seen["details"]
    assert seen["events"] == [] and text == ""


def test_a_cancel_ends_the_request_on_the_server(server: Served, generate: Generate) -> None:
    code, _, seen = generate("hello", MOST_TOKENS, 10)
    assert code == 1 and seen["code"] == "CANCELLED" and 10 <= len(seen["tokens"]) < MOST_TOKENS
    with Client(server.address) as client:
        assert client.generate("after", SamplingParams(max_tokens=3)).token_ids
        end = time.monotonic() + 30
        while client.load().num_running:
            assert time.monotonic() < end, "the request runs on"
            time.sleep(0.05)


def test_node_sees_the_load_report_and_reflection_under_both_names(server: Served, node: Generate) -> None:
    assert node("hello", 3)[2]["load"] is True
    done = run("node", "dist/services.js", server.address, folder=EXAMPLES / "node")
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)
    assert names["v1"] == names["v1alpha"] and {"pagecast.v1.GenerationService", "grpc.health.v1.Health"} <= set(names["v1"])
