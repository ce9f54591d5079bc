"""Health follows the steps: a worker that is frozen with work in flight is not healthy, and what it leaves is repaired."""

import signal
import time

from e2e.cli_server import serve

from pagecast import Client, SamplingParams, types


def test_a_frozen_worker_is_not_healthy_and_its_stream_goes_on() -> None:
    with serve("--executor", "oracle", "--oracle-step-us", "10000", "--step-deadline-s", "1") as served, Client(served.address) as client:
        expected = client.generate([5, 6, 7], SamplingParams(max_tokens=100, seed=3, ignore_eos=True)).token_ids
        stream = client.stream([5, 6, 7], SamplingParams(max_tokens=100, seed=3, ignore_eos=True))
        got: list[int] = []
        while len(got) < 10:
            event = next(stream)
            if isinstance(event, types.Tokens):
                got += event.token_ids
        served.children()["worker"][0].send_signal(signal.SIGSTOP)
        end = time.monotonic() + 30
        while client.health("readiness") == "SERVING":
            assert time.monotonic() < end, "healthy although nothing moves"
            time.sleep(0.02)
        assert client.health("liveness") == "SERVING"
        for event in stream:
            if isinstance(event, types.Tokens):
                got += event.token_ids
        assert tuple(got) == expected
        end = time.monotonic() + 30
        while client.health() != "SERVING":
            assert time.monotonic() < end, "it does not recover"
            time.sleep(0.02)
