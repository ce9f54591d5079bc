"""Getting in: TLS files, tokens, the `token` command, and options from the environment."""

import hashlib
import os
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pagecast import Client, Tls, channel
from pagecast.access import stays_here, token_metadata
from pagecast.cli.main import main

PAGECAST = [sys.executable, "-m", "pagecast.cli.main"]


@pytest.mark.parametrize(
    ("target", "stays"),
    [
        ("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/x", True), ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
        ("10.0.0.1:1", False), ("example.org:443", False), ("dns:///example.org:1", False), ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("dns:///localhost:1", True),
    ],
)  # fmt: skip
def test_a_token_crosses_no_network_in_plaintext(target: str, stays: bool) -> None:
    assert stays_here(target) is stays
    assert token_metadata(target, "t", True) == (("authorization", "Bearer t"),)
    if stays:
        assert token_metadata(target, "t", False) == (("authorization", "Bearer t"),)
    else:
        with pytest.raises(ValueError, match="plaintext"):
            token_metadata(target, "t", False)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "é"])
def test_what_is_no_token_is_not_sent(token: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        Client("127.0.0.1:1", token=token)


def test_wrong_tls_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its key"):
        Client("127.0.0.1:1", tls=Tls(cert="x"))
    with pytest.raises(ValueError, match="nowhere"):
        Client("127.0.0.1:1", tls=Tls(ca=str(tmp_path / "nowhere")))


def test_the_published_service_config_is_what_several_replicas_get() -> None:
    assert channel.SERVICE_CONFIG["healthCheckConfig"] == {"serviceName": ""}
    method, many = channel.SERVICE_CONFIG["methodConfig"]
    assert method["waitForReady"] and method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert many == {"name": [{"service": "pagecast.v1.GenerationService", "method": "GenerateMany"}], "waitForReady": True}
    assert "healthCheckConfig" in channel.service_config(True) and "healthCheckConfig" not in channel.service_config(False)
    assert not any("waitForReady" in each for each in channel.service_config(True)["methodConfig"])


def test_the_token_command_shows_the_token_and_keeps_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "auth.toml"
    assert main(["token", "team/a", "--file", str(path), "--role", "infer", "--role", "observe", "--days", "2"]) == 0
    assert main(["token", "team/a", "--file", str(path)]) == 0
    first, second = capsys.readouterr().out.split()
    data = tomllib.loads(path.read_text())
    assert data["principal"] == {"team/a": {"roles": ["infer", "observe"]}} and len(data["token"]) == 2
    for token, entry in zip((first, second), data["token"]):
        prefix, token_id, secret = token.split(".")
        assert (prefix, token_id, entry["principal"]) == ("pagecast", entry["id"], "team/a")
        assert entry["sha256"] == hashlib.sha256(secret.encode()).hexdigest() and secret not in path.read_text()
    left = data["token"][0]["expires"] - datetime.now(UTC)
    assert 1.9 < left.total_seconds() / 86400 <= 2 and "expires" not in data["token"][1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["auth.toml"]
    assert main(["token", "team/a", "--file", str(path), "--role", "admin"]) == 2
    assert "team/a is there already" in capsys.readouterr().err and len(tomllib.loads(path.read_text())["token"]) == 2


def test_the_server_reads_what_the_token_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auth_file = pytest.importorskip("pagecast_scheduler.frontend.auth_file")
    path = tmp_path / "auth.toml"
    path.write_text("[principal.bob]\ntenant = 'x'")
    path.chmod(0o640)
    assert main(["token", "bob", "--file", str(path)]) == 0
    assert main(["token", "alice", "--file", str(path), "--days", "0.5"]) == 0
    table = auth_file.read(path)
    bob, alice = (table.of_token(token, datetime.now(UTC)) for token in capsys.readouterr().out.split())
    assert (bob.name, bob.tenant, alice.name) == ("bob", "x", "alice") and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_token_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("x = [")
    assert main(["token", 'a"b']) == 2 and main(["token", "a", "--file", str(bad)]) == 2
    assert main(["token", "a", "--file", str(tmp_path / "no" / "folder.toml")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3 and bad.read_text() == "x = ["


def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PAGECAST, *words], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_options_come_from_the_environment_where_no_flag_is_given() -> None:
    wrong = run("frontend", "--run-dir", "/x", PAGECAST_PORT="many")
    assert wrong.returncode == 2 and "the variable PAGECAST_PORT must be a whole number, not 'many'" in wrong.stderr
    assert "PAGECAST_INSECURE must be on or off" in run("frontend", "--run-dir", "/x", PAGECAST_INSECURE="perhaps").stderr
    assert "PAGECAST_LOG_FORMAT must be one of" in run("frontend", "--run-dir", "/x", PAGECAST_LOG_FORMAT="xml").stderr
    taken = run("frontend", "--model", "", PAGECAST_RUN_DIR="/x", PAGECAST_HOST="10.1.2.3")
    assert taken.returncode == 2 and "plaintext on 10.1.2.3" in taken.stderr
    flag = run("frontend", "--run-dir", "/x", "--model", "", "--port", "70000", PAGECAST_PORT="1")
    assert "port must be 0 to 65535, not 70000" in flag.stderr


def test_wrong_access_is_one_line(tmp_path: Path) -> None:
    for words in (("--token-file", "/nowhere"), ("--ca", "/nowhere"), ("--cert", "/nowhere")):
        done = run("status", *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("pagecast status: ")
    away = run("status", "--target", "10.0.0.1:1", PAGECAST_TOKEN="t")
    assert away.returncode == 2 and "plaintext" in away.stderr
