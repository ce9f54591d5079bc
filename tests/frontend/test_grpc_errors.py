"""Nothing inner leaves the process: malformed bytes, unexpected exceptions, refusals with their details."""

import asyncio
import re
from collections.abc import Callable
from string import printable
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from frontend.conftest import Rig, details, end_frontend

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from pagecast_scheduler.frontend import errors
from pagecast_scheduler.frontend.errors import OF_FINISH, OF_REJECT, Reason, Refusal
from pagecast_wire.intake import Pause, RejectReason, Submit
from pagecast_wire.sampling import FinishReason

LEAK = re.compile(r"Error\b|Exception|Traceback|\.py|/work|/tmp|secret")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def streamed_failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


MALFORMED = {
    "no field": b"\xff\xff\xff",
    "bad UTF-8": b"\x0a\x03\x1a\x01\xff",
    "cut off": b"\x0a\x7f",
    "groups": b"\x0b" * 200,
    "overlong varint": b"\x0a" + b"\xff" * 10 + b"\x01",
}


@pytest.mark.parametrize("data", list(MALFORMED.values()), ids=list(MALFORMED))
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_malformed_bytes_are_an_invalid_argument(rig: Rig, data: bytes, method: str) -> None:
    path = f"/pagecast.v1.GenerationService/{method}"
    if method == "Generate":
        error = await failure(rig.channel.unary_unary(path)(data))
    else:
        error = await streamed_failure(rig.channel.unary_stream(path)(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(error)[1]["ErrorInfo"].reason == "MALFORMED_REQUEST"
    assert not LEAK.search(error.details() or "")
    assert rig.scheduler.all(Submit) == []


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_unexpected_exception_leaves_only_an_opaque_id(rig: Rig, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("secret prompt at /tmp/secret")

    monkeypatch.setattr("pagecast_scheduler.frontend.generation.check_spec", explode)
    spec = pb.GenerationSpec(prompt_text="x")
    if streaming:
        error = await streamed_failure(rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec)))
    else:
        error = await failure(rig.generation.Generate(pb.GenerateRequest(spec=spec)))
    status, found = details(error)
    assert error.code() is grpc.StatusCode.INTERNAL and found["ErrorInfo"].reason == "BUG"
    assert found["ErrorInfo"].metadata["error_id"] in (error.details() or "")
    assert not LEAK.search(str(status)) and not LEAK.search(error.details() or "")


async def test_field_violations_reach_the_caller_with_their_paths(rig: Rig) -> None:
    spec = pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[600]), sampling=pb.SamplingOptions(top_p=float("nan"), temperature=-1))
    error = await failure(rig.generation.Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    fields = [v.field for v in details(error)[1]["BadRequest"].field_violations]
    assert fields == ["spec.prompt_token_ids.ids[0]", "spec.sampling.temperature", "spec.sampling.top_p"]
    assert "RetryInfo" not in details(error)[1]


def _bad_roles(spec: pb.GenerationSpec) -> None:
    for _ in range(1024):
        spec.chat.messages.add(role="é" * 64, content="x")


def _images(spec: pb.GenerationSpec) -> None:
    spec.chat.messages.add(role="user", parts=[pb.ContentPart(image=pb.Media()) for _ in range(100_000)])


def _bad_sequences(spec: pb.GenerationSpec) -> None:
    spec.prompt_text = "x"
    spec.sampling.bad_token_sequences.extend(pb.TokenIds(ids=[1 << 31] * 100) for _ in range(128))


@pytest.mark.parametrize("fill", [_bad_roles, _images, _bad_sequences])
async def test_as_many_violations_reach_the_caller_as_trailers_hold(rig: Rig, fill: Callable[[pb.GenerationSpec], None]) -> None:
    """Of trailers above a client's limit nothing arrives but RESOURCE_EXHAUSTED, which is said of its own limit."""
    spec = pb.GenerationSpec()
    fill(spec)
    error = await failure(rig.generation.Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and (error.details() or "").endswith("; and more")
    status, found = details(error)
    assert len(found["BadRequest"].field_violations) >= 3
    assert len(quote(error.details() or "", safe=printable)) + 4 * len(status.SerializeToString()) // 3 < 8000


async def test_a_prompt_too_long_names_limit_and_actual(rig: Rig) -> None:
    for spec in (pb.GenerationSpec(prompt_text="x" * 300), pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[1] * 300))):
        error = await failure(rig.generation.Generate(pb.GenerateRequest(spec=spec)))
        info = details(error)[1]["ErrorInfo"]
        assert (info.reason, dict(info.metadata)) == ("PROMPT_TOO_LONG", {"limit": "255", "actual": "300"})


async def test_an_unknown_model_is_not_found_everywhere(rig: Rig) -> None:
    name = "../other" + "x" * 300
    spec = pb.GenerationSpec(model=name, prompt_text="x")
    calls = [
        rig.generation.Generate(pb.GenerateRequest(spec=spec)),
        model_pb2_grpc.ModelServiceStub(rig.channel).GetModel(model_pb2.GetModelRequest(model=name)),
        tokenizer_pb2_grpc.TokenizerServiceStub(rig.channel).Tokenize(tokenizer_pb2.TokenizeRequest(model=name, text="x")),
    ]
    for call in calls:
        error = await failure(call)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details() == f"no model {name[:128]!r} is served here, but 'tiny'"
        assert details(error)[1]["ErrorInfo"].reason == "MODEL_UNKNOWN" and len(details(error)[1]["ResourceInfo"].resource_name) == 128


async def test_a_message_over_the_limit_is_refused_by_name_and_a_huge_one_by_the_transport(rig: Rig) -> None:
    generate = rig.channel.unary_unary("/pagecast.v1.GenerationService/Generate")
    limit = rig.config.max_message_bytes
    error = await failure(generate(b"\x00" * (limit + 1)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = details(error)[1]["ErrorInfo"]
    assert info.reason == "MESSAGE_TOO_LARGE" and dict(info.metadata) == {"limit": str(limit), "actual": str(limit + 1)}
    assert (await failure(generate(b"\x00" * (limit + (4 << 20))))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_gzip_bomb_is_refused_before_it_expands(rig: Rig) -> None:
    spec = pb.GenerationSpec(prompt_text="x" * (64 << 20))
    data = pb.GenerateRequest(spec=spec).SerializeToString()
    error = await failure(rig.channel.unary_unary("/pagecast.v1.GenerationService/Generate")(data, compression=grpc.Compression.Gzip))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rig.scheduler.all(Submit) == []


async def test_long_texts_beyond_what_can_wait_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagecast_scheduler.frontend.prompts.MAX_WAITING", 0)
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(rig.channel)
    error = await failure(stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 5000)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and details(error)[1]["ErrorInfo"].reason == "OVERLOADED"
    monkeypatch.undo()
    assert len((await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 5000))).token_ids) == 5000


def test_every_refusal_and_every_bad_end_has_a_row() -> None:
    assert set(OF_REJECT) == set(RejectReason)
    successes = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIME_LIMIT}
    assert set(OF_FINISH) == set(FinishReason) - successes


@pytest.mark.parametrize("reason", list(Reason))
def test_retry_advice_goes_with_unavailable_and_quotas_alone_and_with_pushback(reason: Reason) -> None:
    refusal = Refusal(reason)
    keys = {key for key, _ in refusal.trailers()}
    # A used-up quota says when to come back, but no retry policy may do so by itself: its status is not in the policy.
    is_retryable = reason.code is grpc.StatusCode.UNAVAILABLE or reason.name.startswith("QUOTA_")
    assert ("grpc-retry-pushback-ms" in keys) == is_retryable
    assert any(d.TypeName() == "google.rpc.RetryInfo" for d in refusal.status().details) == is_retryable
    assert errors.DOMAIN == "pagecast" and refusal.status().code == reason.code.value[0]


async def test_a_caller_that_leaves_in_the_middle_of_a_write_is_no_error_of_ours(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waits for the reader can fail before the word of the cancel arrives."""
    errors_logged: list[str] = []
    monkeypatch.setattr("pagecast_scheduler.frontend.boundary.log.error", lambda event, **_: errors_logged.append(event))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    channel = grpc.aio.insecure_channel(rig.frontend.address, options=options)
    spec = pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5]))
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    calls = [stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)) for _ in range(8)]
    sent = 0
    keys = [(await rig.scheduler.accept(number + 1)).key for number in range(len(calls))]
    while len(rig.scheduler.all(Pause)) < len(calls):
        for key in keys:
            await rig.scheduler.tokens(key, sent, [7] * 20_000)
        sent += 20_000
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await channel.close()
    await rig.scheduler.until(lambda: len(rig.scheduler.aborted()) == len(calls))
    await end_frontend(rig)
    assert errors_logged == []
