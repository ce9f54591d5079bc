"""A whole cluster behind TLS, client certificates and tokens, configured by variables, asked by commands and both clients."""

import asyncio
from pathlib import Path

import pytest
from e2e.cli_server import pagecast, serve
from frontend.secure_rig import Authority

from pagecast import AsyncClient, Client, SamplingParams, Tls
from pagecast.errors import Unauthenticated, Unavailable

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def test_commands_and_clients_get_in_with_certificate_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.make(tmp_path)
    (cert, key), (mine, my_key) = authority.issue("server", "127.0.0.1", "llm.example.org"), authority.issue("client", "client.example.org")
    ca, auth_file, token_file = str(tmp_path / "ca.pem"), str(tmp_path / "auth.toml"), tmp_path / "token"
    made = pagecast("token", "alice", "--file", auth_file, "--role", "infer", "--role", "observe")
    token_file.write_text(made.stdout)
    for name, value in (("TLS_CERT", cert), ("TLS_KEY", key), ("TLS_CLIENT_CA", ca), ("AUTH_FILE", auth_file)):
        monkeypatch.setenv(f"PAGECAST_{name}", value)
    access = ("--ca", ca, "--cert", mine, "--key", my_key)
    with serve("--executor", "oracle", "--oracle-vocab-size", "2048") as served:
        target = ("--target", served.address, "--timeout", "60")
        status = pagecast("status", *target, *access, "--token-file", str(token_file))
        assert status.returncode == 0 and "SERVING" in status.stdout, status.stderr
        answer = pagecast("generate", "x", "--max-tokens", "3", *target, *access, "--token-file", str(token_file))
        assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr
        for name, code in (("llm.example.org", 0), ("other.example.org", 1)):
            named = pagecast("status", "--check", *target, *access, "--token-file", str(token_file), "--server-name", name)
            assert named.returncode == code, (name, named)
        bare = pagecast("generate", "x", *target, *access)
        assert bare.returncode == 1 and "bearer token" in bare.stderr and len(bare.stderr.splitlines()) == 1
        tls, token = Tls(ca, mine, my_key), token_file.read_text().strip()
        with Client(served.address, tls=tls, token=token) as client:
            assert len(client.generate("x", PARAMS).token_ids) == 3
        with Client(served.address, tls=tls, token=token + "x") as wrong, pytest.raises(Unauthenticated):
            wrong.generate("x", PARAMS)
        with Client(served.address, tls=Tls(ca), token=token) as uncertified, pytest.raises(Unavailable):
            uncertified.generate("x", PARAMS)
        assert len(asyncio.run(ask(served.address, tls, token))) == 3
        assert served.end() == 0
    assert not [line for line in served.lines if token.rpartition(".")[2] in line]


async def ask(address: str, tls: Tls, token: str) -> tuple[int, ...]:
    async with AsyncClient(address, tls=tls, token=token) as client:
        return (await client.generate("x", PARAMS)).token_ids
