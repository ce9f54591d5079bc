"""The endpoint under test: stubs of the public API, and calls whose every event is held to the stream's laws."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagecast import access
from pagecast.channel import target_of
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, runtime_pb2, runtime_pb2_grpc

PATIENCE_S = 300.0
"""Deadline of a call that is expected to end by itself."""


class Broken(AssertionError):
    """A promise was broken; the text says which, in one line."""


def hold(is_kept: bool, text: str) -> None:
    """Raises Broken unless a promise is kept."""
    if not is_kept:
        raise Broken(text)


@dataclass
class Output:
    """One sequence, joined. calls: (name, arguments) of each tool call."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    reason: int = 0
    stop: str | int | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)

    @property
    def data(self) -> bytes:
        """The bytes of all ids, as far as log-probability records tell them."""
        return b"".join(record.token_bytes for record in self.logprobs)


@dataclass
class Answer:
    """A whole result, from a stream or from one answer; the two must be equal."""

    effective: pb.EffectiveParameters
    outputs: list[Output]
    usage: pb.Usage
    prompt_logprobs: list[pb.TokenLogprob]


@dataclass(frozen=True)
class Failure:
    """How a call failed. fields: paths of its BadRequest. facts: ErrorInfo's metadata."""

    code: str
    reason: str
    fields: tuple[str, ...]
    facts: Mapping[str, str]
    message: str


def failure_of(error: grpc.RpcError) -> Failure:
    """A failed call's status and details."""
    trailers: Any = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    reason, fields, facts = "", (), {}
    for packed in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if packed.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
        elif packed.Unpack(bad):
            fields = tuple(violation.field for violation in bad.field_violations)
    return Failure(error.code().name, reason, fields, facts, error.details() or "")


class Endpoint:
    """Connection to a server. Use it inside one event loop, as `async with`."""

    def __init__(self, target: str, *, tls: access.Tls | None = None, token: str | None = None) -> None:
        options: list[tuple[str, Any]] = [("grpc.enable_retries", 0)]
        options += [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        target = target_of(target)
        self.metadata = tuple(access.token_metadata(target, token, tls is not None))
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target, options)
        else:
            self.channel = grpc.aio.secure_channel(target, tls.credentials(), [*options, *tls.options()])
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self._models: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self._runtime: Any = runtime_pb2_grpc.RuntimeServiceStub(self.channel)
        self.model = model_pb2.Model()

    async def __aenter__(self) -> Self:
        answer = await self._models.GetModel(model_pb2.GetModelRequest(), timeout=PATIENCE_S, metadata=self.metadata)
        self.model = answer.model
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.channel.close()

    def stream(self, spec: pb.GenerationSpec, timeout: float = PATIENCE_S) -> Any:
        """A GenerateStream call, under way."""
        return self.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=timeout, metadata=self.metadata)

    async def streamed(self, spec: pb.GenerationSpec) -> Answer:
        """The joined events of a stream that must end well."""
        events = [message.event async for message in self.stream(spec)]
        return joined(events)

    async def whole(self, spec: pb.GenerationSpec, timeout: float = PATIENCE_S) -> Answer:
        """The same in one answer."""
        answer = await self.generation.Generate(pb.GenerateRequest(spec=spec), timeout=timeout, metadata=self.metadata)
        return Answer(answer.effective, [_of_sequence(s) for s in answer.sequences], answer.usage, list(answer.prompt_logprobs))

    async def load(self) -> runtime_pb2.GetLoadResponse | None:
        """How busy the server is; None where it does not tell this caller."""
        try:
            load: runtime_pb2.GetLoadResponse = await self._runtime.GetLoad(
                runtime_pb2.GetLoadRequest(), timeout=PATIENCE_S, metadata=self.metadata
            )
            return load
        except grpc.RpcError:
            return None


def _stop_of(message: pb.SequenceFinishedEvent | pb.GeneratedSequence) -> str | int | None:
    kind = message.WhichOneof("matched_stop")
    return None if kind is None else message.stop_text if kind == "stop_text" else message.stop_token_id


def _of_sequence(sequence: pb.GeneratedSequence) -> Output:
    calls = [[call.name, call.arguments] for call in sequence.tool_calls]
    return Output(
        list(sequence.token_ids), sequence.text, sequence.reasoning_text, calls, list(sequence.logprobs), sequence.reason,
        _stop_of(sequence), sequence.usage,
    )


def joined(events: Sequence[pb.StreamEvent]) -> Answer:
    """A whole stream as one answer, every law of its events checked."""
    kinds = [event.WhichOneof("event") for event in events]
    hold([event.seq for event in events] == list(range(1, len(events) + 1)), "seq does not count 1, 2, 3 ...")
    hold(kinds[:1] == ["accepted"] and kinds.count("accepted") == 1, "accepted is not the first event, once")
    hold(kinds[-1:] == ["completed"] and kinds.count("completed") == 1, "completed is not the last event, once")
    effective = events[0].accepted.effective
    outputs = [Output() for _ in range(effective.num_sequences or 1)]
    ended: set[int] = set()
    prompt: list[pb.TokenLogprob] = []
    for event, kind in zip(events, kinds):
        if kind == "prompt":
            hold(not any(o.ids or o.text for o in outputs), "a prompt event after tokens")
            hold(event.prompt.first_position == len(prompt), "prompt records with a gap or repeat")
            prompt += event.prompt.logprobs
        elif kind == "tokens":
            hold(event.tokens.sequence_index not in ended, "tokens after the end of their sequence")
            _append(outputs[event.tokens.sequence_index], event.tokens, effective)
        elif kind == "sequence_finished":
            end = event.sequence_finished
            hold(end.sequence_index not in ended, "a sequence ended twice")
            ended.add(end.sequence_index)
            output = outputs[end.sequence_index]
            output.reason, output.stop, output.usage = end.reason, _stop_of(end), end.usage
    hold(len(ended) == len(outputs), "a sequence did not end")
    return Answer(effective, outputs, events[-1].completed.usage, prompt)


def _append(output: Output, tokens: pb.TokensEvent, effective: pb.EffectiveParameters) -> None:
    if tokens.token_ids:
        hold(tokens.first_token_offset == len(output.ids), f"offset {tokens.first_token_offset} after {len(output.ids)} tokens")
    if effective.HasField("logprobs_top_n") and tokens.token_ids:
        hold([r.token_id for r in tokens.logprobs] == list(tokens.token_ids), "log-probabilities do not stand beside their ids")
    output.ids += tokens.token_ids
    output.text += tokens.text
    output.reasoning += tokens.reasoning_text
    output.logprobs += tokens.logprobs
    for piece in tokens.tool_calls:
        if piece.id:
            hold(piece.index == len(output.calls), "tool calls are not counted 0, 1, 2 ...")
            output.calls.append([piece.name, ""])
        output.calls[piece.index][1] += piece.arguments


def differences(one: Answer, other: Answer) -> Iterable[str]:
    """In what two answers to the same request differ; log-probabilities may differ by rounding."""
    counts: dict[str, int] = defaultdict(int)
    for at, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)):
        for name in ("ids", "text", "reasoning", "calls", "reason", "stop"):
            if getattr(a, name) != getattr(b, name):
                yield f"{name} of sequence {at}: {str(getattr(a, name))[:80]!r} and {str(getattr(b, name))[:80]!r}"
        counts["a"] += a.usage.output_tokens
        counts["b"] += b.usage.output_tokens
    if counts["a"] != counts["b"]:
        yield f"output tokens {counts['a']} and {counts['b']}"
    if one.usage.prompt_tokens != other.usage.prompt_tokens:
        yield f"prompt tokens {one.usage.prompt_tokens} and {other.usage.prompt_tokens}"
