"""Certificates and authorities that are replaced on disk while a cluster serves, as cert-manager does: no process starts again, old
connections live on, new ones see what is there now."""

import hashlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
from e2e.cli_server import LIMIT_S, PAGECAST, Served, serve
from frontend.secure_rig import Authority, write
from waiting import until

from pagecast import Client, SamplingParams, Tls
from pagecast.errors import Unavailable
from pagecast.types import Tokens

ORACLE = ("--executor", "oracle", "--oracle-vocab-size", "2048")
LONG = SamplingParams(max_tokens=2000, ignore_eos=True, seed=7)
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


class Party:
    """An authority, and the pair that it has issued for each name, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.authority = folder, Authority.make(folder)
        self.ca = str(folder / "ca.pem")

    def pair(self, name: str, identity: str = "client.example.org") -> tuple[str, str]:
        return self.authority.issue(name, identity)


def put(source: str, target: str) -> None:
    write(Path(target), Path(source).read_bytes())


def shown(address: str, ca: str, client: tuple[str, str] | None = None) -> str:
    """A digest of the certificate that a new handshake is shown. Raises ssl.SSLError for one that `ca` has not issued."""
    host, _, port = address.rpartition(":")
    trusted = ssl.create_default_context(cafile=ca)
    trusted.set_alpn_protocols(["h2"])
    if client is not None:
        trusted.load_cert_chain(*client)
    encrypted = partial(trusted.wrap_socket, server_hostname=host)
    with socket.create_connection((host, int(port)), LIMIT_S) as plain, encrypted(plain) as connection:
        return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


def is_served(served: Served, tls: Tls) -> bool:
    """Whether a new connection gets an answer."""
    try:
        with Client(served.address, tls=tls) as client:
            return len(client.generate([1, 2], FEW).token_ids) == 3
    except Unavailable:
        return False


def test_front_ends_take_over_certificates_and_authorities(tmp_path: Path) -> None:
    first, second = Party(tmp_path / "first"), Party(tmp_path / "second")
    cert, key = first.pair("server", "127.0.0.1")
    client_ca = write(tmp_path / "client-ca.pem", Path(first.ca).read_bytes())
    old, new = first.pair("client"), second.pair("client")
    words = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", client_ca, "--oracle-step-us", "3000")
    with serve(*ORACLE, *words) as served, Client(served.address, tls=Tls(first.ca, *old)) as kept:
        stream = iter(kept.stream([1, 2, 3], LONG))
        events = [next(stream)]
        before = shown(served.address, first.ca, old)
        again = second.pair("server", "127.0.0.1")
        put(again[0], cert)  # a certificate whose key is not there yet
        until(lambda: told(served) == 1, "a pair that does not belong together is not told")
        write(Path(key), Path(again[1]).read_bytes()[:200])  # and the half of that key
        until(lambda: told(served) == 2, "half a key is not told")
        assert shown(served.address, first.ca, old) == before and is_served(served, Tls(first.ca, *old))
        put(again[1], key)
        until(lambda: is_served(served, Tls(second.ca, *old)), "a new certificate is not taken over")
        assert not is_served(served, Tls(first.ca, *old)) and not is_served(served, Tls(second.ca, *new))
        put(second.ca, client_ca)
        until(lambda: is_served(served, Tls(second.ca, *new)), "a new client CA is not taken over")
        assert not is_served(served, Tls(second.ca, *old))
        events += stream
        tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        assert len(tokens) == LONG.max_tokens and kept.generate([1, 2, 3], LONG).token_ids == tuple(tokens)
        assert told(served) == 2  # each fault once


def told(served: Served) -> int:
    """How many faults of changed certificates the log has."""
    return sum("certificates not taken over" in line for line in served.lines)


@contextmanager
def gateway_over_tls(served: Served, ca: str, pair: tuple[str, str]) -> Iterator[tuple[str, list[str]]]:
    """The address of a gateway that trusts and shows these files, and what it logs."""
    access = ("--target-ca", ca, "--target-cert", pair[0], "--target-key", pair[1])
    command = [*PAGECAST, "gateway", "--target", served.address, "--http-port", "0", "--log-format", "json", *access]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        lines: list[str] = []
        try:
            assert gateway.stderr is not None
            address = next(json.loads(line)["address"] for line in gateway.stderr if '"address"' in line)
            reader = threading.Thread(target=lambda: lines.extend(gateway.stderr or ()), daemon=True)
            reader.start()
            yield address, lines
            gateway.kill()
            reader.join(LIMIT_S)
        finally:
            gateway.kill()


def test_a_gateway_reaches_front_ends_with_what_its_files_hold_now(tmp_path: Path) -> None:
    first, second = Party(tmp_path / "first"), Party(tmp_path / "second")
    (cert, key), mine = first.pair("server", "127.0.0.1"), first.pair("gateway")
    client_ca = write(tmp_path / "client-ca.pem", Path(first.ca).read_bytes())
    words = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", client_ca, "--oracle-step-us", "2000")
    with serve(*ORACLE, *words) as served, gateway_over_tls(served, first.ca, mine) as (address, lines):
        asked = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 2}

        def status() -> int:
            return httpx.post(f"{address}/v1/completions", json=asked, timeout=LIMIT_S).status_code

        assert status() == 200
        long = asked | {"max_tokens": LONG.max_tokens, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=long, timeout=LIMIT_S) as reply:
            events = reply.iter_lines()
            next(events)
            for source, target in zip((*second.pair("server", "127.0.0.1"), second.ca), (cert, key, client_ca), strict=True):
                put(source, target)
            until(lambda: is_served(served, Tls(second.ca, *second.pair("client"))), "front ends do not take them over")
            write(Path(mine[0]), b"half of a certific")
            until(lambda: status() == 200 and any("not taken over" in line for line in lines), "a bad certificate is not told")
            for source, target in zip((*second.pair("gateway"), second.ca), (*mine, first.ca), strict=True):
                put(source, target)
            until(lambda: status() == 200 and any("reloaded" in line for line in lines), "a new certificate is not taken over")
            assert [line for line in events if line][-1] == "data: [DONE]"
        served.children()["frontend"][0].kill()  # and with it what is connected still
        until(lambda: status() == 200, "a gateway shows a certificate that is no more")
