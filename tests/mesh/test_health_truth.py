"""Health follows the steps: a worker that is frozen with work in flight is not healthy, and what it leaves is repaired."""

import signal

import grpc
from e2e.cli_server import LIMIT_S, serve
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast import Client, SamplingParams, types
from pagecast_worker.oracle import oracle_tokens

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_frozen_worker_is_not_healthy_and_its_stream_goes_on() -> None:
    with serve("--executor", "oracle", "--oracle-step-us", "10000", "--step-deadline-s", "1") as served, Client(served.address) as client:
        sampling = SamplingParams(max_tokens=400, seed=3, ignore_eos=True)
        expected = oracle_tokens([5, 6, 7], 400, seed=3)
        stream = client.stream([5, 6, 7], sampling)
        got: list[int] = []
        while len(got) < 10:
            event = next(stream)
            if isinstance(event, types.Tokens):
                got += event.token_ids
        with grpc.insecure_channel(served.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=LIMIT_S)
            next(watch)  # from here on it tells of every change
            served.children()["worker"][0].send_signal(signal.SIGSTOP)
            assert NOT_SERVING in (seen.status for seen in watch), "healthy although nothing moves"
        assert client.health("liveness") == "SERVING"
        for event in stream:
            if isinstance(event, types.Tokens):
                got += event.token_ids
        assert got == expected
        with grpc.insecure_channel(served.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            assert SERVING in (seen.status for seen in watch), "it does not recover"
