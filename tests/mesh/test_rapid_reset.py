"""Calls reset as soon as they are begun, over many connections at once: what Envoy keeps away, and what the server lives through."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from e2e.cli_server import LIMIT_S, Served, serve
from mesh.envoy import envoy
from mesh.resets import flood

from pagecast import Client, SamplingParams
from pagecast.errors import Cancelled

NUM_CONNECTIONS = 16
CANARY = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
MEBIBYTE = 1 << 20
EACH_S = 120.0
PREMATURE = "http.pagecast.downstream_rq_too_many_premature_resets"


@pytest.fixture
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--oracle-vocab-size", "2048", "--max-model-len", "256") as running:
        yield running


def test_a_flood_over_many_connections_is_kept_away_by_envoy(served: Served) -> None:
    """Every connection that floods is hung up on, and others are served by the same Envoy and the same replica meanwhile."""
    frontend = served.children()["frontend"][0]
    with tempfile.TemporaryDirectory(prefix="pc") as name, envoy(Path(name), [served.address]) as proxy, Client(proxy.address) as client:
        proxy.until_healthy({served.address})
        song = client.generate("canary", CANARY).token_ids
        before = frontend.memory_info().rss
        with flood(proxy.address, NUM_CONNECTIONS) as attack:
            end = time.monotonic() + LIMIT_S
            while attack.num_hung_up < NUM_CONNECTIONS:
                assert time.monotonic() < end, f"{attack.num_hung_up} hung up on after {attack.num_sent} calls"
                assert client.generate("canary", CANARY, timeout=EACH_S).token_ids == song
            for _ in range(5):
                assert client.generate("canary", CANARY, timeout=EACH_S).token_ids == song
        assert proxy.counter(PREMATURE) >= NUM_CONNECTIONS
        assert frontend.is_running() and frontend.memory_info().rss - before < 128 * MEBIBYTE


@pytest.mark.mesh
def test_a_flood_on_the_bare_server_ends_with_the_flood(served: Served) -> None:
    """gRPC's own server answers every one of the calls, and others wait for it: but it lives, and then serves as before."""
    frontend = served.children()["frontend"][0]
    files = frontend.num_fds()
    with Client(served.address) as client:
        song = client.generate("canary", CANARY).token_ids
        with flood(served.address, NUM_CONNECTIONS) as attack:
            end = time.monotonic() + LIMIT_S
            while attack.num_sent < 200_000:
                assert time.monotonic() < end
                time.sleep(0.05)
        end = time.monotonic() + LIMIT_S
        while frontend.num_fds() > files + 5:
            assert time.monotonic() < end, "connections stay open"
            time.sleep(0.05)
        heard: tuple[int, ...] = ()
        while heard != song:  # what was waiting to be handed over is gone through first, and a few calls are still dropped
            assert time.monotonic() < end and frontend.is_running()
            with suppress(Cancelled):
                heard = client.generate("canary", CANARY, timeout=EACH_S).token_ids
                assert heard == song
        assert client.health() == "SERVING" and served.children()["frontend"][0].pid == frontend.pid
