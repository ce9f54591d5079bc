"""Tokens, certificates and roles: who may call what on which listener, quotas, and whose cache and ids are whose."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.cli_server import pagecast
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import finished
from frontend.secure_rig import Authority, auth_file, bearer, entry, secure_channel, token, write
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, runtime_pb2, runtime_pb2_grpc
from pagecast_scheduler.frontend import auth_file as auth_files
from pagecast_scheduler.frontend.authorizer import ROLES, roles_for
from pagecast_scheduler.frontend.main import Frontend, StartError
from pagecast_scheduler.frontend.principals import Principal, Quota, Role
from pagecast_scheduler.frontend.quotas import Quotas
from pagecast_wire.control import Leave
from pagecast_wire.intake import Abort, Phase, Priority, Progress, Submit

PRINCIPALS = """
[principal.alice]
roles = ["infer"]
tenant = "research"

[principal.bob]
roles = ["observe"]

[principal.root]
roles = ["admin"]
max_priority = "batch"
"""


pytestmark = pytest.mark.usefixtures("eager")


def spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(**{"prompt_token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})


def generate(rig: Rig, name: str, **fields: Any) -> Any:
    """An answer under way."""
    return rig.generation.Generate(pb.GenerateRequest(spec=spec(**fields)), metadata=bearer(name))


async def refused(call: Any) -> tuple[str, str]:
    """Status code and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, details(caught.value)[1]["ErrorInfo"].reason


async def answer(rig: Rig, call: Any, count: int) -> Submit:
    """Lets the count-th submit succeed with one token."""
    submit = await rig.scheduler.accept(count)
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await call
    return submit


async def start(folder: Path, more: str = "", **changes: Any) -> Rig:
    names = [line.split(".")[1].rstrip("]") for line in (PRINCIPALS + more).splitlines() if line.startswith("[principal.")]
    return await start_rig(folder, auth_file=auth_file(folder, PRINCIPALS + more + "".join(map(entry, names))), **changes)


async def test_without_a_known_token_nobody_is_served_and_none_is_told_why(folder: Path) -> None:
    rig = await start(folder)
    bare = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    assert await refused(bare) == ("UNAUTHENTICATED", "TOKEN_MISSING")
    texts = set()
    for wrong in (
        "Bearer pagecast.id-alice.secret-of-bob", "Bearer pagecast.id-nobody.secret-of-alice", f"Bearer {token('alice')}x", "Bearer x",
        f"Bearer other.{token('alice').split('.', 1)[1]}", "Bearer " + "x" * 8000,
    ):  # fmt: skip
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(("authorization", wrong),))
        assert details(caught.value)[1]["ErrorInfo"].reason == "TOKEN_INVALID"
        texts.add(caught.value.details())
    assert len(texts) == 1
    for form in ("Basic abc", token("alice"), "Bearer "):
        call = rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(("authorization", form),))
        assert (await refused(call))[0] == "UNAUTHENTICATED"
    assert rig.scheduler.all(Submit) == []
    submit = await answer(rig, generate(rig, "alice"), 1)
    assert submit.tenant == "research"
    await stop_rig(rig)


async def test_the_status_command_shows_what_a_role_may_see_and_names_the_one_that_is_missing(folder: Path) -> None:
    rig = await start(folder)
    needs = {"load": "this method needs the role observe", "models": "this method needs the role infer or observe"}
    for name, closed in (("alice", ["load"]), ("bob", []), ("root", ["load", "models"])):
        write(folder / "token", token(name).encode())
        words = ["status", "--target", rig.frontend.address, "--token-file", str(folder / "token"), "--timeout", "60"]
        shown = [await asyncio.to_thread(pagecast, *words, *more) for more in ([], ["--json"])]
        assert [done.returncode for done in shown] == [0, 0], shown[0].stderr
        lines, told = shown[0].stdout.splitlines(), json.loads(shown[1].stdout)
        assert lines[0].startswith("health   SERVING") and told["health"] == "SERVING"
        for what, begins in (("load", "so far"), ("models", "model ")):
            is_closed = what in closed
            assert any(line.startswith(begins) for line in lines) is (told[what] is not None) is not is_closed
            assert (f"{what:8} not for this caller: {needs[what]}" in lines) is is_closed
        assert told["denied"] == {what: needs[what] for what in closed}
    await stop_rig(rig)


async def test_forged_tenant_metadata_means_nothing(folder: Path) -> None:
    rig = await start(folder)
    forged = (("x-forwarded-for", "10.0.0.1"), ("x-tenant", "bob"), ("pagecast-tenant", "bob"), ("pagecast-principal", "bob"))
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(*bearer("alice"), *forged))
    assert (await answer(rig, call, 1)).tenant == "research"
    await stop_rig(rig)


async def test_every_method_that_reflection_lists_asks_the_authorizer(folder: Path) -> None:
    """No token: nothing. Each role: what the table says, and nothing else. The same on every listener that asks."""
    rig = await start(folder, admin_port=0)
    far = rig.frontend._operators[1].address
    home = grpc.aio.insecure_channel(f"unix:{folder}/admin-0.sock")
    checked = 0
    async with grpc.aio.insecure_channel(far) as operators:
        for channel in (rig.channel, operators):
            for method, is_streaming in await methods_of(home):
                assert method.strip("/").split("/")[0] in ROLES, f"{method}: its service has no row in the table of roles"
                assert await code_of(channel, method, is_streaming, ()) in ("UNAUTHENTICATED", "UNIMPLEMENTED"), method
                for name, role in (("alice", Role.INFER), ("bob", Role.OBSERVE), ("root", Role.ADMIN)):
                    code = await code_of(channel, method, is_streaming, bearer(name))
                    is_closed = role not in roles_for(method) and code != "UNIMPLEMENTED"
                    assert (code == "PERMISSION_DENIED") == is_closed, (method, name, code)
                    checked += 1
    assert checked > 60
    await home.close()
    await stop_rig(rig)


async def test_the_public_listener_knows_no_operators_service(folder: Path) -> None:
    rig = await start_rig(folder)
    for method, is_streaming in [("/grpc.channelz.v1.Channelz/GetServers", False), ("/pagecast.v1.AdminService/Drain", False)]:
        assert await code_of(rig.channel, method, is_streaming, ()) == "UNIMPLEMENTED"
    async with grpc.aio.insecure_channel(f"unix:{folder}/admin-0.sock") as home:
        assert await code_of(home, "/grpc.channelz.v1.Channelz/GetServers", False, ()) in ("OK", "CANCELLED")
    await stop_rig(rig)


async def methods_of(channel: grpc.aio.Channel) -> list[tuple[str, bool]]:
    """Every method that reflection lists: its path, and whether it takes a stream."""
    call: Any = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [service.name for service in (await call.read()).list_services_response.service]
    found: dict[str, bool] = {}
    for name in names:
        if name == "grpc.reflection.v1.ServerReflection":  # described under its older name alone
            found[f"/{name}/ServerReflectionInfo"] = True
            continue
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        for data in (await call.read()).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            for service in file.service:
                if f"{file.package}.{service.name}" in names:
                    found |= {f"/{file.package}.{service.name}/{m.name}": m.client_streaming for m in service.method}
    await call.done_writing()
    return sorted(found.items())


async def code_of(channel: grpc.aio.Channel, method: str, is_streaming: bool, metadata: Any) -> str:
    """The status of a call with nothing in it; one that gets as far as to be answered, or to wait for the scheduler, is CANCELLED by us."""
    call: Any = channel.stream_stream(method)(metadata=metadata) if is_streaming else channel.unary_stream(method)(b"", metadata=metadata)
    if is_streaming:
        await call.done_writing()
    try:
        first = await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 20.0)
        if first is not grpc.aio.EOF:
            call.cancel()
    except TimeoutError:
        call.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return str((await call.code()).name)


async def test_a_changed_file_counts_for_the_next_call_and_a_bad_one_does_not(folder: Path, logged: list[dict[str, Any]]) -> None:
    rig = await start(folder)
    await answer(rig, generate(rig, "alice"), 1)
    auth_file(folder, PRINCIPALS + entry("bob"))  # alice's token is withdrawn
    assert (await refused(generate(rig, "alice")))[1] == "TOKEN_INVALID"
    auth_file(folder, PRINCIPALS + entry("carol", "alice"))
    await answer(rig, generate(rig, "carol"), 2)
    auth_file(folder, PRINCIPALS + "rubbish = [")
    await answer(rig, generate(rig, "carol"), 3)
    auth_file(folder, PRINCIPALS, mode=0o644)
    await answer(rig, generate(rig, "carol"), 4)
    assert [line["event"] for line in logged].count("auth file not taken over, the last good one stays in use") == 2
    await stop_rig(rig)


async def test_what_kept_a_file_from_being_read_may_go_without_a_change_of_the_file(folder: Path, logged: list[dict[str, Any]]) -> None:
    rig = await start(folder)
    path = Path(auth_file(folder, PRINCIPALS + entry("bob"), mode=0o644))  # alice's token is withdrawn, in a file that all may read
    for count in (1, 2):
        await answer(rig, generate(rig, "alice"), count)
    path.chmod(0o600)
    assert (await refused(generate(rig, "alice")))[1] == "TOKEN_INVALID"
    said = [line["event"] for line in logged if line["event"].startswith("auth file")]
    assert said == ["auth file not taken over, the last good one stays in use", "auth file reloaded"]
    await stop_rig(rig)


def test_a_file_that_lets_nobody_in_is_taken_and_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(auth_files.log, "warning", lambda event, **fields: said.append(f"{event} {fields['path']}"))
    nobody, alice = '[principal.alice]\nroles = ["infer"]\n', entry("alice")
    for text in ("", nobody, nobody + alice):
        auth_files.read(Path(auth_file(folder, text)))
    assert said == [f"the auth file holds no token and no certificate's name: nobody may ask {folder / 'auth.toml'}"] * 2


async def test_certificates_that_nobody_is_asked_for_are_spoken_of_in_the_log_and_not_to_the_caller(
    folder: Path, logged: list[dict[str, Any]]
) -> None:
    rig = await start(folder, "[principal.eve]\nsans = ['eve.example.org']\n")
    assert any("no client shows one without --tls-client-ca" in line["event"] for line in logged)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    assert caught.value.details() == "a bearer token that is known here is needed"
    await stop_rig(rig)


async def test_a_token_ends_with_its_time(folder: Path) -> None:
    now = datetime.now(UTC)
    text = PRINCIPALS + entry("alice", expires=now - timedelta(seconds=1)) + entry("later", "alice", expires=now + timedelta(days=1))
    rig = await start_rig(folder, auth_file=auth_file(folder, text))
    assert await refused(generate(rig, "alice")) == ("UNAUTHENTICATED", "TOKEN_EXPIRED")
    await answer(rig, generate(rig, "later"), 1)
    await stop_rig(rig)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[principal.a]\nrole = []", "principal.a.role"), ("[principal.a]\nroles = ['chief']", "chief"), ("principal = 3", "principal"),
        ("[principal.a]\nstreams = -1", "principal.a.streams"), ("[principal.a]\nstreams = true", "principal.a.streams"),
        ("[principal.a]\nmax_priority = 'highest'", "max_priority"), ("[principal.a]\nsans = 'x'", "principal.a.sans"),
        ("[principal.a]\nsans = ['x']\n[principal.b]\nsans = ['x']", "'x' already belongs"), ("[principal.a]\ntenant = ''", "tenant"),
        (entry("a"), r"token\[0\].principal"), ("[principal.a]\n" + entry("a") + entry("a"), "twice"), ("token = 5", "token"),
        ("[principal.a]\n" + entry("a").replace("sha256 = \"", "sha256 = \"zz"), r"token\[0\].sha256"),
        ("x = 1", "x: there is no such key"),
        ("[principal.a]\n" + entry("a") + "expires = 2027-01-01\n", r"token\[0\].expires"), ("a = [", "not valid"),
        ("[principal.a]\n" + entry("a") + "colour = 'red'\n", r"token\[0\].colour"),
    ],
)  # fmt: skip
async def test_a_file_that_is_wrong_stops_the_start_and_names_the_key(folder: Path, text: str, word: str) -> None:
    path = auth_file(folder, text)
    with pytest.raises(auth_files.AuthFileError, match=word):
        auth_files.read(Path(path))
    with pytest.raises(auth_files.AuthFileError, match="mode 0644"):
        auth_files.read(Path(auth_file(folder, "", mode=0o644)))


async def test_a_missing_file_stops_the_start(folder: Path) -> None:
    from pagecast_scheduler.frontend.config import FrontendConfig

    with pytest.raises(StartError, match=r"nowhere\.toml: No such file"):
        await Frontend(FrontendConfig(run_dir=str(folder), port=0, auth_file=str(folder / "nowhere.toml"))).start()


async def test_a_certificates_name_is_a_principal(folder: Path) -> None:
    authority = Authority.make(folder)
    cert, key = authority.issue("server", "127.0.0.1")
    text = PRINCIPALS + "[principal.eve]\nsans = ['eve.example.org']\ntenant = 'evening'\n" + entry("bob")
    rig = await start_rig(folder, tls_cert=cert, tls_key=key, tls_client_ca=str(folder / "ca.pem"), auth_file=auth_file(folder, text))
    async with secure_channel(rig.frontend.address, authority.pem, authority.issue("eve", "eve.example.org")) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        submit = await answer(rig, stub.Generate(pb.GenerateRequest(spec=spec())), 1)
        assert submit.tenant == "evening"
        # A token says more than the certificate under it.
        call = runtime_pb2_grpc.RuntimeServiceStub(channel).GetLoad(runtime_pb2.GetLoadRequest(), metadata=bearer("bob"))
        assert (await call).num_running == 1
    async with secure_channel(rig.frontend.address, authority.pem, authority.issue("mallory", "mallory.example.org")) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert await refused(stub.Generate(pb.GenerateRequest(spec=spec()))) == ("UNAUTHENTICATED", "TOKEN_MISSING")
    await stop_rig(rig)


async def test_without_a_file_a_certificates_first_name_is_tenant_and_principal(folder: Path) -> None:
    authority = Authority.make(folder)
    cert, key = authority.issue("server", "127.0.0.1")
    rig = await start_rig(folder, tls_cert=cert, tls_key=key, tls_client_ca=str(folder / "ca.pem"))
    spaces = []
    for count, name in enumerate(("a.example.org", "b.example.org"), start=1):
        async with secure_channel(rig.frontend.address, authority.pem, authority.issue("client", name)) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            submit = await answer(rig, stub.Generate(pb.GenerateRequest(spec=spec())), count)
            assert submit.tenant == name
            spaces.append(submit.cache_namespace)
            assert await code_of(channel, "/grpc.channelz.v1.Channelz/GetServers", False, ()) == "UNIMPLEMENTED"
    assert spaces[0] != spaces[1]
    await stop_rig(rig)


async def test_callers_share_neither_caches_nor_request_ids(folder: Path) -> None:
    """Also not by asking for the same scope; two principals of one tenant are two callers."""
    rig = await start(folder, "[principal.ada]\ntenant = 'research'\n")
    fields: dict[str, Any] = {"request_id": "the-same", "cache": pb.CacheOptions(cache_scope="ours")}
    first, second = generate(rig, "alice", **fields), generate(rig, "ada", **fields)
    submits = [await rig.scheduler.accept(1), await rig.scheduler.accept(2)]
    # The scheduler, which all front ends share, tells requests apart by these two.
    assert {(s.identity.owner, s.identity.request_id) for s in submits if s.identity} == {("alice", "the-same"), ("ada", "the-same")}
    assert submits[0].cache_namespace != submits[1].cache_namespace and {s.tenant for s in submits} == {"research"}
    for submit in submits:
        await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await asyncio.gather(first, second)
    await stop_rig(rig)


async def test_models_and_priorities_are_the_principals(folder: Path) -> None:
    rig = await start(folder, "[principal.eve]\nmodels = ['other']\n[principal.low]\nmax_priority = 'batch'\n")
    assert await refused(generate(rig, "eve")) == ("PERMISSION_DENIED", "MODEL_NOT_ALLOWED")
    high = pb.SchedulingOptions(priority=pb.PRIORITY_INTERACTIVE)
    assert await refused(generate(rig, "low", scheduling=high)) == ("PERMISSION_DENIED", "PRIORITY_NOT_ALLOWED")
    assert (await answer(rig, generate(rig, "low"), 1)).priority == Priority.BATCH  # silence asks for no more than is allowed
    assert (await answer(rig, generate(rig, "alice", scheduling=high), 2)).priority == Priority.INTERACTIVE
    in_metadata = rig.generation.Generate(pb.GenerateRequest(spec=spec()), metadata=(*bearer("low"), ("pagecast-priority", "normal")))
    assert await refused(in_metadata) == ("PERMISSION_DENIED", "PRIORITY_NOT_ALLOWED")
    await stop_rig(rig)


async def test_quotas_of_streams_and_of_the_queue(folder: Path) -> None:
    rig = await start(folder, "[principal.few]\nstreams = 2\n[principal.impatient]\nqueued_requests = 1\n")
    calls = [generate(rig, "few")]
    first = await rig.scheduler.accept(1)
    calls.append(generate(rig, "few"))
    second = await rig.scheduler.accept(2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(rig, "few")
    found = details(caught.value)[1]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and found["ErrorInfo"].reason == "QUOTA_REQUESTS"
    assert found["QuotaFailure"].violations[0].subject == "principal:few" and found["RetryInfo"].retry_delay.seconds == 1
    await answer(rig, generate(rig, "alice"), 3)  # others are not concerned
    calls[0].cancel()
    await rig.scheduler.next(Abort)
    await answer(rig, generate(rig, "few"), 4)
    await rig.scheduler.tokens(second.key, 0, [1], finished(second.key, 1))
    await calls[1]
    waiting = generate(rig, "impatient")
    queued = await rig.scheduler.accept(5)
    assert await refused(generate(rig, "impatient")) == ("RESOURCE_EXHAUSTED", "QUOTA_REQUESTS")
    await rig.scheduler.progress(Progress(queued.key, Phase.PREFILLING, 0, 0, 3, 0))
    async with asyncio.timeout(20):
        while next(iter(rig.frontend.state.engine.calls)).is_queued:
            await asyncio.sleep(0.01)
    await answer(rig, generate(rig, "impatient"), 6)
    await rig.scheduler.tokens(queued.key, 0, [1], finished(queued.key, 1))
    await waiting
    assert first.key != second.key
    await stop_rig(rig)


class Waiting:
    is_queued = True


def test_tokens_are_reserved_and_then_settled() -> None:
    now = 0.0
    quotas = Quotas(lambda: now)
    alice = Principal("alice", "t", frozenset({Role.INFER}), Quota(tokens_per_minute=600))

    def wait_ms(prompt: int, output: int) -> int:
        from pagecast_scheduler.frontend.errors import Refusal

        with pytest.raises(Refusal) as caught:
            quotas.admit(alice, Waiting(), prompt, output)
        assert caught.value.reason.name == "QUOTA_TOKENS"
        return caught.value.retry_after_ms

    lease = quotas.admit(alice, Waiting(), 100, 400)
    assert wait_ms(1, 199) == 10_001  # 100 are left; 100 more come in ten seconds
    lease.end(150)
    lease.end(150)  # once only: 350 of 500 come back, 450 are there
    again = quotas.admit(alice, Waiting(), 50, 400)
    assert wait_ms(0, 1) == 101
    now += 6.0
    assert quotas.admit(alice, Waiting(), 10, 50)
    again.end(450)
    now += 3600.0
    assert quotas.admit(alice, Waiting(), 0, 600)  # never more than a minute's worth gathers
    assert wait_ms(0, 601) == 60_000 and wait_ms(1, 0) == 101
    bob = Principal("bob", "t", frozenset({Role.INFER}))
    assert quotas.admit(bob, Waiting(), 10**9, 10**9)


async def test_a_request_settles_with_what_it_used(folder: Path) -> None:
    rig = await start(folder, "[principal.thrifty]\ntokens_per_minute = 60\n")
    stopping = pb.StoppingOptions(max_output_tokens=57)
    call = generate(rig, "thrifty", stopping=stopping)  # 60 reserved
    submit = await rig.scheduler.accept(1)
    await rig.scheduler.tokens(submit.key, 0, [1] * 27, finished(submit.key, 27))
    await call  # 30 used; one a second comes back
    assert await refused(generate(rig, "thrifty", stopping=stopping)) == ("RESOURCE_EXHAUSTED", "QUOTA_TOKENS")
    await answer(rig, generate(rig, "thrifty", stopping=pb.StoppingOptions(max_output_tokens=27)), 2)
    await stop_rig(rig)


async def test_tokens_of_a_request_that_goes_on_without_its_caller_stay_reserved_until_its_end(folder: Path) -> None:
    rig = await start(folder, "[principal.thrifty]\ntokens_per_minute = 60\nstreams = 1\n")
    stopping = pb.StoppingOptions(max_output_tokens=57)
    delivery = pb.DeliveryOptions(on_disconnect=pb.ON_DISCONNECT_DETACH, detach_grace=Duration(seconds=60))
    request = pb.GenerateStreamRequest(spec=spec(stopping=stopping), delivery=delivery)
    call = rig.generation.GenerateStream(request, metadata=bearer("thrifty"))
    submit = await rig.scheduler.accept(1)
    await call.read()
    call.cancel()
    await rig.scheduler.next(Leave)
    less = pb.StoppingOptions(max_output_tokens=40)
    async with asyncio.timeout(60):
        assert await refused(generate(rig, "thrifty", stopping=less)) == ("RESOURCE_EXHAUSTED", "QUOTA_TOKENS")  # and no stream is counted
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))  # 56 come back
    await answer(rig, generate(rig, "alice"), 2)  # which was heard of behind that end
    await answer(rig, generate(rig, "thrifty", stopping=less), 3)
    await stop_rig(rig)
