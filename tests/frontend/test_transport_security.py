"""TLS and mTLS: who gets in, what happens when files change, what may be plaintext, who owns an address."""

import asyncio
import os
import socket
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.secure_rig import Authority, secure_channel, write
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast.errors import WrongAccess
from pagecast_scheduler.frontend import certificates
from pagecast_scheduler.frontend.config import FrontendConfig, check
from pagecast_scheduler.frontend.listeners import PortInUse
from pagecast_scheduler.frontend.main import Frontend, StartError
from pagecast_scheduler.gateway.backend import Backend
from pagecast_scheduler.gateway.config import GatewayConfig
from pagecast_scheduler.gateway.config import check as check_gateway

CHECK = health_pb2.HealthCheckRequest()


pytestmark = pytest.mark.usefixtures("eager")


async def asked(channel: grpc.aio.Channel) -> str:
    """The outcome of a health check: its status, or the code it failed with."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(CHECK, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def serial_of(address: str, root: bytes) -> str:
    """SHA-256 of the certificate that a new handshake shows."""
    import hashlib
    import ssl

    def shake() -> str:
        context = ssl.create_default_context(cadata=root.decode())
        context.set_alpn_protocols(["h2"])
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=20) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
            shown = tls.getpeercert(binary_form=True)
            assert shown is not None
            return hashlib.sha256(shown).hexdigest()

    return await asyncio.to_thread(shake)


async def start_tls(folder: Path, authority: Authority, **changes: Any) -> Rig:
    cert, key = authority.issue("server", "127.0.0.1")
    return await start_rig(folder, tls_cert=cert, tls_key=key, **changes)


async def test_tls_serves_those_who_trust_it_and_nobody_in_plaintext(folder: Path) -> None:
    authority = Authority.make(folder)
    rig = await start_tls(folder, authority)
    async with secure_channel(rig.frontend.address, authority.pem) as channel:
        assert await asked(channel) == "SERVING"
    async with secure_channel(rig.frontend.address, Authority.make(folder).pem) as stranger:
        assert await asked(stranger) == "UNAVAILABLE"
    assert await asked(rig.channel) == "UNAVAILABLE"  # the rig's own channel speaks plaintext
    await stop_rig(rig)


async def test_with_a_client_ca_a_handshake_without_its_certificate_fails(folder: Path) -> None:
    authority = Authority.make(folder)
    rig = await start_tls(folder, authority, tls_client_ca=str(folder / "ca.pem"))
    async with secure_channel(rig.frontend.address, authority.pem, authority.issue("client", "client.example.org")) as channel:
        assert await asked(channel) == "SERVING"
    async with secure_channel(rig.frontend.address, authority.pem) as bare:
        assert await asked(bare) == "UNAVAILABLE"
    (folder / "other").mkdir()
    other = Authority.make(folder / "other")
    async with secure_channel(rig.frontend.address, authority.pem, other.issue("client", "client.example.org")) as wrong:
        assert await asked(wrong) == "UNAVAILABLE"
    expired = authority.issue("old", "client.example.org", not_after=datetime.now(UTC) - timedelta(days=1))
    async with secure_channel(rig.frontend.address, authority.pem, expired) as late:
        assert await asked(late) == "UNAVAILABLE"
    await stop_rig(rig)


async def test_a_gateway_reaches_front_ends_over_tls_with_its_certificate(folder: Path) -> None:
    authority = Authority.make(folder)
    rig = await start_tls(folder, authority, tls_client_ca=str(folder / "ca.pem"))
    cert, key = authority.issue("gateway", "gateway.example.org")
    (folder / "other").mkdir()
    Authority.make(folder / "other")
    own = str(folder / "ca.pem")

    async def serves(**access: Any) -> bool:
        config = GatewayConfig(target=rig.frontend.address, **access)
        backend = Backend([config.target], config.access)
        try:
            return await backend.is_serving(())
        finally:
            await backend.close()

    assert await serves(target_ca=own, target_cert=cert, target_key=key)
    assert not await serves(target_ca=own)  # shows no certificate
    assert not await serves(target_tls=True, target_cert=cert, target_key=key)  # the system's authorities do not know the server
    assert not await serves(target_ca=str(folder / "other" / "ca.pem"), target_cert=cert, target_key=key)
    assert not await serves(target_ca=own, target_cert=cert, target_key=key, target_name="elsewhere.example.org")
    assert not await serves()
    with pytest.raises(WrongAccess, match="cannot read /nowhere"):
        await serves(target_ca="/nowhere/ca.pem")
    await stop_rig(rig)


def test_a_gateways_certificate_and_its_key_go_together() -> None:
    assert check_gateway(GatewayConfig(target="localhost:1", target_cert="a.pem")) == "target_cert and target_key go together"


async def test_a_new_certificate_is_taken_over_and_a_bad_one_is_not(folder: Path, logged: list[dict[str, Any]]) -> None:
    authority = Authority.make(folder)
    rig = await start_tls(folder, authority)
    address, metrics = rig.frontend.address, rig.frontend._guards.metrics
    first = await serial_of(address, authority.pem)
    async with secure_channel(address, authority.pem) as kept:
        assert await asked(kept) == "SERVING"
        end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
        cert, _ = authority.issue("server", "127.0.0.1", not_after=end)
        second = await serial_of(address, authority.pem)
        assert second != first
        async with asyncio.timeout(20):
            while metrics.registry.get_sample_value("pagecast_frontend_certificate_expiry_timestamp_seconds") != end.timestamp():
                await asyncio.sleep(0.05)
        write(Path(cert), b"not a certificate")
        assert await serial_of(address, authority.pem) == second
        assert await asked(kept) == "SERVING"
        assert any("certificates not taken over" in line["event"] and cert in line["detail"] for line in logged)
        key_of_another = authority.issue("another", "127.0.0.1")[1]
        authority.issue("server", "127.0.0.1")
        write(Path(folder / "server.key"), Path(key_of_another).read_bytes())
        assert await serial_of(address, authority.pem) == second
        authority.issue("server", "127.0.0.1")
        assert await serial_of(address, authority.pem) not in (first, second)
    async with asyncio.timeout(20):
        while not metrics.registry.get_sample_value("pagecast_frontend_reload_failures", {"what": "certificates"}):
            await asyncio.sleep(0.05)
    await stop_rig(rig)


@pytest.mark.parametrize("broken", ["missing", "not PEM", "key of another", "readable by everyone", "client CA not PEM"])
async def test_a_start_with_bad_files_names_the_file(folder: Path, broken: str) -> None:
    authority = Authority.make(folder)
    cert, key = authority.issue("server", "127.0.0.1")
    named = cert if broken in ("not PEM", "missing") else key
    client_ca = None
    if broken == "missing":
        os.unlink(cert)
    elif broken == "not PEM":
        write(Path(cert), b"hello")
    elif broken == "key of another":
        key = named = authority.issue("another", "127.0.0.1")[1]
    elif broken == "readable by everyone":
        os.chmod(key, 0o644)
    else:
        client_ca = named = write(folder / "client-ca.pem", b"hello")
    frontend = Frontend(FrontendConfig(run_dir=str(folder), port=0, tls_cert=cert, tls_key=key, tls_client_ca=client_ca))
    with pytest.raises(StartError, match=named):
        await frontend.start()


def test_a_password_protected_key_is_refused_by_name(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, key = Authority.make(tmp_path).issue("server", "127.0.0.1")
    private = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    locked = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )  # fmt: skip
    with pytest.raises(certificates.CertificateError, match="without a password"):
        certificates.read(Path(cert), Path(write(tmp_path / "locked.key", locked)), None)


def test_what_may_listen_in_plaintext() -> None:
    def problem(**changes: Any) -> str | None:
        return check(FrontendConfig("/x", **changes))

    assert "plaintext on 0.0.0.0" in (problem(host="0.0.0.0") or "")
    assert problem(host="0.0.0.0", tls_cert="c", tls_key="k") is None
    assert problem(host="0.0.0.0", insecure=True) is None
    assert "tls_key" in (problem(tls_cert="c") or "") and "tls_client_ca" in (problem(tls_client_ca="c") or "")
    assert "auth_file" in (problem(admin_port=1) or "")
    assert "plaintext on 10.0.0.1" in (problem(admin_port=1, auth_file="f", admin_host="10.0.0.1") or "")
    assert problem(probe_port=1, probe_host="0.0.0.0") is None  # says nothing but a status
    for field, value in (("probe_port", 70000), ("admin_port", -1), ("max_connections", 0), ("max_streams_per_connection", 0)):
        assert field in (problem(**{field: value}) or "")
    assert "otlp_endpoint" in (problem(otlp_endpoint="collector:4317") or "")


async def test_unix_sockets_are_this_users_alone_and_not_taken_from_whoever_listens(folder: Path) -> None:
    path = folder / "c.sock"
    rig = await start_rig(folder, uds=str(path))
    for made in (path, folder / "admin-0.sock"):
        assert stat.S_IMODE(made.stat().st_mode) & 0o077 == 0, oct(made.stat().st_mode)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await asked(channel) == "SERVING"
        second = Frontend(FrontendConfig(run_dir=str(folder), port=0, uds=str(path), index=1))
        with pytest.raises(PortInUse, match=r"c\.sock: another process"):
            await second.start()
        assert await asked(channel) == "SERVING"
    await stop_rig(rig)
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    stale.bind(str(path))
    stale.close()  # what a killed process leaves behind
    again = await start_rig(folder, uds=str(path))
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await asked(channel) == "SERVING"
    await stop_rig(again)
    path.unlink(missing_ok=True)
    path.write_text("somebody's file")
    with pytest.raises(PortInUse, match=r"c\.sock: what is there is no socket"):
        await Frontend(FrontendConfig(run_dir=str(folder), port=0, uds=str(path))).start()
    assert path.read_text() == "somebody's file"


async def test_a_unix_socket_asks_for_a_token_but_for_health(folder: Path) -> None:
    rig = await start_rig(folder, auth_file=write(folder / "auth.toml", b""), uds=str(folder / "c.sock"))
    async with grpc.aio.insecure_channel(f"unix:{folder}/c.sock") as channel:
        assert await asked(channel) == "SERVING"
        for method in ("/pagecast.v1.GenerationService/Generate", "/pagecast.v1.RuntimeService/GetLoad"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await stop_rig(rig)


async def test_probes_need_no_credentials_and_get_health_alone(folder: Path) -> None:
    authority = Authority.make(folder)
    auth = write(folder / "auth.toml", b"")
    rig = await start_tls(folder, authority, auth_file=auth, probe_port=0)
    assert rig.frontend._probes is not None
    async with grpc.aio.insecure_channel(rig.frontend._probes.address) as probe:
        assert await asked(probe) == "SERVING"
        for method in ("/pagecast.v1.GenerationService/Generate", "/pagecast.v1.RuntimeService/GetLoad"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await probe.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with secure_channel(rig.frontend.address, authority.pem) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(CHECK)
        assert details(caught.value)[1]["ErrorInfo"].reason == "TOKEN_MISSING"
    await stop_rig(rig)
