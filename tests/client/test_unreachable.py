"""A call whose timeout runs out because nothing was ever reached says why."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.fake_server import FakeServer

from pagecast import AsyncClient, Client, reaching
from pagecast.access import Tls
from pagecast.errors import DeadlineExceeded, RpcError, Unavailable, WrongAccess

TIMEOUT_S = 0.02
"""Less than gRPC takes to give up by itself, so that the timeout is what ends a call."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine: the question after a timeout is answered, and ends as soon as it is."""
    monkeypatch.setattr(reaching, "ASK_S", 60.0)


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address that nobody listens on, and that nobody gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and answers nothing."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"


def asked(how: str, target: str, tls: Tls | bool | None = None, timeout: float = TIMEOUT_S) -> RpcError:
    """What one call of this kind ends with."""

    async def wait() -> None:
        async with AsyncClient(target, tls=tls) as client:
            if how == "async health":
                await client.health(timeout=timeout)
            else:
                async for _ in client.stream("slow", timeout=timeout):
                    pass

    with pytest.raises(RpcError) as caught:
        if how.startswith("async"):
            asyncio.run(wait())
        else:
            with Client(target, tls=tls) as client:
                if how == "health":
                    client.health(timeout=timeout)
                else:
                    list(client.stream("slow", timeout=timeout))
    return caught.value


KINDS = ("health", "stream", "async health", "async stream")


@pytest.mark.parametrize("how", KINDS)
def test_nobody_listens(refusing: str, how: str) -> None:
    error = asked(how, refusing)
    assert (type(error), error.code) == (DeadlineExceeded, "DEADLINE_EXCEEDED")
    assert str(error).startswith(f"the call's timeout ran out: no connection to {refusing}: ") and "Connection refused" in str(error)


@pytest.mark.parametrize("how", KINDS)
def test_the_handshake_fails(server: FakeServer, how: str) -> None:
    error = asked(how, server.target, tls=True)
    assert error.code == "DEADLINE_EXCEEDED"
    assert "Tls handshake failed" in str(error) and "the server speaks no TLS there" in str(error)


@pytest.mark.parametrize("how", KINDS)
def test_nothing_answers(silent: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "ASK_S", 0.1)
    assert str(asked(how, silent)) == f"the call's timeout ran out: nothing answers at {silent}"


@pytest.mark.parametrize("how", ["stream", "async stream"])
def test_a_stream_that_tried_again_says_what_stopped_it(refusing: str, how: str) -> None:
    error = asked(how, refusing, timeout=1.5)  # gRPC gives up after 0.6 to 0.9 s, and the client begins again
    assert "Connection refused" in str(error)


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:0", "localhost:99999", "localhost:x", "http://localhost:50051", ":1"])
def test_an_endpoint_that_grpc_would_take_for_another_is_refused(endpoint: str) -> None:
    with pytest.raises(WrongAccess, match="an endpoint is HOST:PORT or unix:PATH, not '"):
        Client(endpoint)


@pytest.mark.parametrize("endpoint", ["unix:/x", "unix-abstract:x", "dns:///a:1", "ipv4:127.0.0.1:1,127.0.0.1:2", "[::1]:1", "unix:50051"])
def test_endpoints_of_every_kind_are_taken(endpoint: str) -> None:
    Client(endpoint).close()


def test_pem_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("-----BEGIN CERTIFICATE-----")
    text = str(tmp_path / "text.pem")
    for tls, said in ((Tls(ca=text), "holds no PEM certificate"), (Tls(cert=text, key=text), "are not a certificate and its key in PEM")):
        with pytest.raises(WrongAccess, match=said):
            Client("localhost:1", tls=tls)


def test_a_command_does_not_wait_for_a_server_that_was_never_there(refusing: str) -> None:
    """The client's streams go on for 30 s when their server is lost."""
    begin = time.monotonic()
    for words in (["generate", "x"], ["chat"]):
        command = [sys.executable, "-m", "pagecast.cli.main", *words, "--target", refusing]
        done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "Connection refused" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert time.monotonic() - begin < 60


def test_a_name_that_is_none() -> None:
    assert "Domain name not found" in str(asked("health", "no-such-host.invalid:50051", timeout=60.0))


@pytest.mark.parametrize("how", ["stream", "async stream"])
def test_a_server_that_answers_is_only_slow(server: FakeServer, how: str) -> None:
    assert str(asked(how, server.target, timeout=0.5)) == "the call's timeout ran out"


def test_a_server_that_does_not_serve_yet_says_so(server: FakeServer) -> None:
    server.health_is("NOT_SERVING")
    said = f"the call's timeout ran out: {server.target} answers, and is not serving yet"
    assert str(asked("stream", server.target, timeout=0.5)) == said


def test_a_refused_call_names_the_address_and_not_grpc(refusing: str) -> None:
    with Client(refusing) as client, pytest.raises(Unavailable) as caught:
        client.health(timeout=30)
    assert str(caught.value) == f"no connection to {refusing}: Connection refused"
