"""Other projects' protocols, spoken by their own published stubs: a router for vLLM's engines, and Triton's client for the Open Inference
Protocol."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cli_server import LIMIT_S, Served, serve

CLIENT = Path(__file__).with_name("compat_client.py")
SCENARIOS = [
    "a_stop_token_and_several_sequences",
    "what_we_do_not_do_is_refused_by_name",
    "abort_ends_a_stream_and_passes_over_strangers",
    "the_engine_says_what_it_is_and_how_loaded",
    "the_open_inference_protocol_knows_the_server_and_its_model",
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--oracle-step-us", "5000", "--max-model-len", "4096") as running:
        yield running


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_their_client_is_served(served: Served, scenario: str) -> None:
    done = subprocess.run([sys.executable, str(CLIENT), scenario, served.address], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def test_a_scenario_can_fail(served: Served) -> None:
    nowhere = subprocess.run([sys.executable, str(CLIENT), SCENARIOS[0], "127.0.0.1:1"], capture_output=True, text=True, timeout=LIMIT_S)
    assert nowhere.returncode != 0
