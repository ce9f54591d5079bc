"""A real Envoy in front of two real replicas that run the oracle: idle time-outs, shed requests, health, drain, grpc-web."""

import base64
import http.client
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e.cli_server import Served, serve
from mesh.envoy import Envoy, envoy

from pagecast import Client, SamplingParams, types
from pagecast.errors import RpcError, Unavailable
from pagecast.v1 import generation_pb2 as pb

# One sequence at a time and one waiting: a replica is full after two requests.
ORACLE = ("--executor", "oracle", "--oracle-vocab-size", "2048")
NARROW = (*ORACLE, "--max-num-seqs", "1", "--max-queued-requests", "1", "--max-model-len", "4000")
SLOW = ("--oracle-step-us", "20000")
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pc") as name:
        yield Path(name)


class Mesh:
    """Two replicas, and clients of each."""

    def __init__(self, replicas: list[Served], clients: list[Client]) -> None:
        self.replicas = replicas
        self.clients = clients
        self.addresses = [replica.address for replica in replicas]


@pytest.fixture(scope="module")
def narrow() -> Iterator[Mesh]:
    with ExitStack() as stack:
        replicas = [stack.enter_context(serve(*NARROW, *SLOW)) for _ in range(2)]
        yield Mesh(replicas, [stack.enter_context(Client(replica.address)) for replica in replicas])


def occupy(client: Client) -> object:
    """A stream that keeps the replica's only place; from the moment this returns, it runs."""
    stream = client.stream("x", LONG)
    next(event for event in stream if isinstance(event, types.Tokens))
    return stream


def test_a_quiet_stream_outlives_envoys_idle_timeout_by_its_progress_events(narrow: Mesh, folder: Path) -> None:
    with envoy(folder, narrow.addresses, stream_idle_timeout="6s") as proxy, Client(proxy.address) as client:
        proxy.until_healthy(set(narrow.addresses))
        running = [occupy(replica) for replica in narrow.clients]
        waiting = client.stream("quiet", SHORT, progress_interval=1.0)
        silent = client.stream("silent", SHORT, progress_interval=60.0)
        assert isinstance(next(waiting), types.Accepted) and isinstance(next(silent), types.Accepted)
        with pytest.raises(RpcError):  # what happens without them: Envoy resets the stream
            list(silent)
        until = time.monotonic() + 5  # by then it has been quiet for nearly twice as long
        while time.monotonic() < until:
            assert isinstance(next(waiting), types.Progress)
        for stream in running:
            stream.cancel()  # type: ignore[attr-defined]
        assert isinstance(list(waiting)[-1], types.Completed)


def test_shed_requests_are_tried_on_the_other_replica(narrow: Mesh, folder: Path) -> None:
    with envoy(folder, narrow.addresses) as proxy, Client(proxy.address, options=[("grpc.enable_retries", 0)]) as client:
        proxy.until_healthy(set(narrow.addresses))
        full = narrow.clients[0]
        held = [occupy(full), full.stream("waits", LONG)]
        assert isinstance(next(held[1]), types.Accepted)  # type: ignore[call-overload]
        with Client(narrow.addresses[0], options=[("grpc.enable_retries", 0)]) as direct, pytest.raises(Unavailable) as shed:
            direct.generate("x", SHORT)
        assert shed.value.reason == "OVERLOADED" and shed.value.retry_after
        for _ in range(6):
            assert len(client.generate("x", SHORT).token_ids) == 5
        assert proxy.counter("cluster.pagecast.upstream_rq_retry_success") >= 3
        for stream in held:
            stream.cancel()  # type: ignore[attr-defined]


def test_a_browser_speaks_grpc_web_through_the_filter(narrow: Mesh, folder: Path) -> None:
    with envoy(folder, narrow.addresses) as proxy:
        proxy.until_healthy(set(narrow.addresses))
        spec = pb.GenerationSpec(prompt_text="x", stopping=pb.StoppingOptions(max_output_tokens=5, ignore_eos=True))
        message = pb.GenerateStreamRequest(spec=spec).SerializeToString()
        for kind in ("application/grpc-web+proto", "application/grpc-web-text+proto"):
            events, trailers = ask_web(proxy, message, kind)
            kinds = [event.event.WhichOneof("event") for event in events]
            assert kinds[0] == "accepted" and kinds[-1] == "completed" and b"grpc-status:0" in trailers
            assert sum(len(event.event.tokens.token_ids) for event in events) == 5
        bad = pb.GenerateStreamRequest(spec=pb.GenerationSpec(prompt_text="x", sampling=pb.SamplingOptions(top_p=7))).SerializeToString()
        events, trailers = ask_web(proxy, bad, "application/grpc-web+proto")
        assert events == [] and b"grpc-status:3" in trailers


def ask_web(proxy: Envoy, message: bytes, kind: str) -> tuple[list[pb.GenerateStreamResponse], bytes]:
    """The messages and the trailer block of a grpc-web call; a refusal may come as headers alone."""
    body = b"\0" + struct.pack(">I", len(message)) + message
    connection = http.client.HTTPConnection(proxy.address, timeout=60)
    text = "text" in kind
    headers = {"content-type": kind, "accept": kind, "x-grpc-web": "1", "origin": "http://localhost:3000"}
    connection.request("POST", "/pagecast.v1.GenerationService/GenerateStream", base64.b64encode(body) if text else body, headers)
    answer = connection.getresponse()
    data = answer.read()
    assert answer.status == 200 and answer.getheader("access-control-allow-origin") == "http://localhost:3000"
    trailers = b"".join(f"{key}:{value}\r\n".encode() for key, value in answer.getheaders())
    if text:  # each chunk is base64 by itself
        data = b"".join(base64.b64decode(part + b"=" * (-len(part) % 4)) for part in split_base64(data))
    events = []
    while data:
        flag, size = data[0], struct.unpack(">I", data[1:5])[0]
        if flag & 0x80:
            trailers += data[5 : 5 + size]
        else:
            events.append(pb.GenerateStreamResponse.FromString(data[5 : 5 + size]))
        data = data[5 + size :]
    connection.close()
    return events, trailers


def split_base64(data: bytes) -> Iterator[bytes]:
    """Pieces of concatenated base64, each with its padding."""
    start = 0
    while (end := data.find(b"=", start)) >= 0:
        while end < len(data) and data[end : end + 1] == b"=":
            end += 1
        yield data[start:end]
        start = end
    if start < len(data):
        yield data[start:]


def until_answering(client: Client, instances: set[str]) -> None:
    """Waits until these answer, and no others: Envoy's workers hear of health a moment after the page that tests read."""
    end = time.monotonic() + 60
    while {client.server_info().instance_id for _ in range(8)} != instances:
        assert time.monotonic() < end


def test_health_checks_take_traffic_off_a_replica_that_cannot_serve_and_give_it_back(narrow: Mesh, folder: Path) -> None:
    with envoy(folder, narrow.addresses) as proxy, Client(proxy.address) as client:
        proxy.until_healthy(set(narrow.addresses))
        instances = [replica.server_info().instance_id for replica in narrow.clients]
        until_answering(client, set(instances))
        scheduler = narrow.replicas[0].children()["scheduler"][0]
        scheduler.send_signal(signal.SIGSTOP)
        try:
            proxy.until_healthy({narrow.addresses[1]})
            until_answering(client, {instances[1]})
            for _ in range(4):
                assert len(client.generate("x", SHORT).token_ids) == 5
        finally:
            scheduler.send_signal(signal.SIGCONT)
        proxy.until_healthy(set(narrow.addresses))
        until_answering(client, set(instances))


@pytest.mark.mesh
def test_a_replica_drains_without_one_failed_stream(folder: Path) -> None:
    """Streams go through Envoy all the time; one replica ends in order among them, and nobody notices."""
    wide = (*ORACLE, "--oracle-step-us", "2000", "--drain-announce-s", "2", "--drain-timeout-s", "60")
    with serve(*wide) as first, serve(*wide) as second, envoy(folder, [first.address, second.address]) as proxy:
        proxy.until_healthy({first.address, second.address})
        stop, failures, served = threading.Event(), list[str](), list[int]()

        def stream_on() -> None:
            with Client(proxy.address, options=[("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]) as client:
                while not stop.is_set():
                    try:
                        events = list(client.stream("x", SamplingParams(max_tokens=100, ignore_eos=True)))
                        served.append(sum(len(event.token_ids) for event in events if isinstance(event, types.Tokens)))
                    except RpcError as error:
                        failures.append(f"{error.code} {error.reason} {error}")

        threads = [threading.Thread(target=stream_on, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(served) < 12:
            time.sleep(0.05)
        assert first.end() == 0
        after = len(served)
        while len(served) < after + 12:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == [] and set(served) == {100}
