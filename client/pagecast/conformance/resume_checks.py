"""Checks of streams that go on after their connection, and of cancelling by id."""

import random
from typing import Any

import grpc

from pagecast.conformance.checks import Data, compare, require, spec_of, with_logprobs
from pagecast.conformance.endpoint import Endpoint, Output, failure_of, hold, joined
from pagecast.v1 import generation_pb2 as pb

DETACHED = pb.DeliveryOptions(on_disconnect=pb.ON_DISCONNECT_DETACH)


def named(spec: pb.GenerationSpec) -> pb.GenerationSpec:
    """The spec with an id of its own."""
    spec.request_id = f"conformance-{random.getrandbits(64):x}"
    return spec


def begun(endpoint: Endpoint, spec: pb.GenerationSpec) -> Any:
    """A stream that survives its connection."""
    request = pb.GenerateStreamRequest(spec=spec, delivery=DETACHED)
    return endpoint.generation.GenerateStream(request, timeout=300, metadata=endpoint.metadata)


def resumed(endpoint: Endpoint, request_id: str, offset: int) -> Any:
    """The rest of a stream, from an offset on."""
    cursor = pb.SequenceCursor(sequence_index=0, next_token_offset=offset)
    request = pb.ResumeStreamRequest(request_id=request_id, cursors=[cursor])
    return endpoint.generation.ResumeStream(request, timeout=300, metadata=endpoint.metadata)


async def refusal(call: Any) -> tuple[str, str]:
    """(code, reason) with which a stream is refused."""
    try:
        async for _ in call:
            pass
    except grpc.RpcError as error:
        failure = failure_of(error)
        return failure.code, failure.reason
    return "OK", ""


async def resume(endpoint: Endpoint, data: Data) -> str:
    """A stream that lost its connection goes on from any offset, to two readers at once, and says what an undisturbed one says."""
    require(endpoint, data)
    spec = with_logprobs(named(spec_of(data)))
    call, have = begun(endpoint, spec), Output()
    while len(have.ids) < data["break_after"]:
        tokens = (await call.read()).event.tokens
        have.ids += tokens.token_ids
        have.text += tokens.text
        have.logprobs += tokens.logprobs
    call.cancel()
    calls = [resumed(endpoint, spec.request_id, len(have.ids)), resumed(endpoint, spec.request_id, 0)]
    rest: list[pb.StreamEvent] = []
    again: list[pb.StreamEvent] = []
    for call, events in zip(calls, (rest, again)):
        async for message in call:
            events.append(message.event)
    whole = joined(again)
    later = [event.tokens for event in rest]
    hold(rest[0].WhichOneof("event") == "accepted" and rest[-1].WhichOneof("event") == "completed", "the rest is no whole stream")
    output = whole.outputs[0]
    hold(have.ids + [i for t in later for i in t.token_ids] == output.ids, "ids before and after the break are not the stream's")
    hold(have.text + "".join(t.text for t in later) == output.text, "text before and after the break is not the stream's")
    spec.request_id = ""
    remark = compare(whole, await endpoint.whole(spec))
    future = await refusal(resumed(endpoint, rest[0].accepted.request_id, 10**6))
    hold(future == ("INVALID_ARGUMENT", "FIELD_VIOLATION"), f"an offset in the future: {future}")
    unknown = await refusal(resumed(endpoint, "no-such-request", 0))
    hold(unknown == ("NOT_FOUND", "REQUEST_UNKNOWN"), f"an unknown request: {unknown}")
    return remark


async def cancel_by_id(endpoint: Endpoint, data: Data) -> str:
    """CancelGeneration ends a live stream, once; later it is finished; an id that is unknown is not found."""
    spec = named(spec_of(data))
    call = endpoint.stream(spec)
    await call.read()

    async def cancel(request_id: str) -> int:
        request = pb.CancelGenerationRequest(request_id=request_id)
        answer = await endpoint.generation.CancelGeneration(request, timeout=60, metadata=endpoint.metadata)
        return int(answer.result)

    hold(await cancel(spec.request_id) == pb.CANCEL_RESULT_CANCELLED, "a live request was not cancelled")
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        hold(False, "the cancelled stream ended well")
    except grpc.RpcError as error:
        got = failure_of(error)
        hold((got.code, got.reason) == ("CANCELLED", "BY_API"), f"the stream ended with {got.code} {got.reason}")
        hold({"prompt_tokens", "output_tokens", "emitted_tokens"} <= set(got.facts), "its end does not tell its usage")
    hold(await cancel(spec.request_id) == pb.CANCEL_RESULT_ALREADY_FINISHED, "a finished request is not reported as such")
    try:
        await cancel("no-such-request")
        hold(False, "an unknown request was cancelled")
    except grpc.RpcError as error:
        got = failure_of(error)
        hold((got.code, got.reason) == ("NOT_FOUND", "REQUEST_UNKNOWN"), f"an unknown request: {got.code} {got.reason}")
    return ""

