"""Every target of the engine, on one GPU and on two, is measured by some command of benchmarks/gpu.sh: the script runs with an interpreter
that only notes what it was asked for, and each bench's own code names the metrics of that."""

import argparse
import json
import os
import shlex
import stat
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from pagecast.bench import load, results
from pagecast.cli import bench, bench_serve, bench_startup, bench_throughput

ROOT = Path(__file__).parents[2]
RECORDS = results.read_all(str(ROOT / "benchmarks/results"))
PARTS = (
    "beside8b", "beside135m", "defaults", "static", "startup", "servers8b", "servers135m", "ours8b", "ours135m", "invariant", "plans",
    "scale1", "scale2", "ranks70b",
)
RECORDER = """#!{python}
import json, os, signal, sys
words = sys.argv[1:]
if words[0] == "-c":
    os.execv(sys.executable, [sys.executable, *words])
with open({log!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
if words[2:4] == ["serve", "--random-weights"]:
    print("serving", flush=True)
    signal.pause()
if "vllm.entrypoints.openai.api_server" in words:
    sys.exit("no such peer")
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Words of every `pagecast bench` that the script asks for."""
    folder = tmp_path_factory.mktemp("gpu")
    python, log = folder / "python", folder / "commands"
    python.write_text(RECORDER.format(python=sys.executable, log=str(log)))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    env = os.environ | {"PYTHON": str(python), "RESULTS": str(folder / "results"), "TOKENIZER": str(folder)}
    done = subprocess.run(["bash", str(ROOT / "benchmarks/gpu.sh"), *PARTS], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [words[3:] for words in found if words[:3] == ["-m", "pagecast.cli.main", "bench"]]


def parsed(module: object, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(words)


def metrics_of(kind: str, words: list[str]) -> set[str]:
    """Names under which a command would write its figures."""
    if kind == "throughput":
        args = parsed(bench_throughput, words)
        cells = bench_throughput.figures([1.0], 1, [([1], 1)])
        engines = ([] if args.peer_only else ["pagecast"]) + ([args.peer] if args.peer else [])
        return set(bench_throughput.metrics_of(args, {name: dict.fromkeys(engines, cells) for name in args.workload}))
    if kind == "serve":
        args = parsed(bench_serve, words)
        summary = load.summarize([load.Timeline(0.0, [(0.1, 1), (0.2, 1)])], 1.0, None, None)
        return set(bench_serve.metrics_of(args.name, [(rate, {"pagecast": summary}) for rate in args.rate or [None]]))
    assert kind == "startup"
    args = parsed(bench_startup, words)
    start = {"serving_s": 1.0, "first_token_s": 1.0, "kv_tokens": 1, "phases": {}}
    return set(bench_startup.metrics_of(args.random_weights, [start] * args.starts))


def test_every_target_of_the_engine_is_measured_by_the_script(commands: list[list[str]]) -> None:
    targets = tomllib.loads((ROOT / "benchmarks/targets.toml").read_text())["target"]
    wanted = {target["metric"] for target in targets if target["group"] in ("engine", "two GPUs")}
    measured = set().union(*(metrics_of(kind, words) for kind, *words in commands))
    assert wanted - measured == set()


def test_no_other_command_writes_the_figure_of_a_whole_workload(commands: list[list[str]]) -> None:
    """Static batching takes 64 requests of a workload: its figures have names of their own."""
    static = [words for kind, *words in commands if "transformers" in words]
    assert len(static) == 1
    assert all(".first64." in name for name in metrics_of("throughput", static[0]))


def test_servers_without_a_peer_are_measured_alone_and_ended(commands: list[list[str]]) -> None:
    runs = [words for kind, *words in commands if kind == "serve"]
    assert len(runs) == 3 and not any("--peer-url" in words for words in runs)
    assert {words[words.index("--name") + 1] for words in runs} == {"llama8b_text", "smol135m"}


def module_of(kind: str) -> ModuleType:
    return import_module(f"pagecast.cli.bench_{kind}")


def test_every_measurement_that_writes_its_figures_is_told_where_by_one_option() -> None:
    for kind in bench.names():
        assert {flag for flag in flags_of(module_of(kind)) if flag in ("--json", "--output", "--results")} == {"--results"}, kind


def flags_of(module: ModuleType) -> set[str]:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def test_commands_of_recorded_figures_can_be_given_again() -> None:
    targets = tomllib.loads((ROOT / "benchmarks/targets.toml").read_text())["target"]
    recorded = {target["command"] for target in targets if "command" in target} | {record["command"] for record in RECORDS}
    assert len(recorded) > 20
    for command in recorded:
        program, group, kind, *words = shlex.split(command)
        assert (program, group) == ("pagecast", "bench")
        parsed(module_of(kind), words)
