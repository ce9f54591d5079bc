"""A gRPC server that speaks pagecast.v1 from a script, so that clients are tested without a model or a cluster."""

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, runtime_pb2, runtime_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

USAGE = pb.Usage(prompt_tokens=3, cached_prompt_tokens=1, output_tokens=2, recomputed_tokens=0)
TIMINGS = pb.Timings(queue=Duration(nanos=5_000_000), first_token=Duration(nanos=250_000_000), total=Duration(seconds=1, nanos=500_000_000))


def refusal(code: int, message: str, *details: Any) -> Any:
    """A google.rpc.Status with packed details, in the form that context.abort_with_status takes."""
    packed = []
    for detail in details:
        box = any_pb2.Any()
        box.Pack(detail)
        packed.append(box)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


def said(spec: pb.GenerationSpec) -> str:
    """The text of a prompt, or of a conversation's last message."""
    return spec.chat.messages[-1].content if spec.chat.messages else spec.prompt_text


class Script(generation_pb2_grpc.GenerationServiceServicer):
    """Answers by the prompt's text, or a chat's last: "bad", "busy", "flaky", "slow", "endless", else two tokens, of "foreign"
    in two scripts. Keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerationSpec] = []
        self.attempts = 0
        self.cancelled = threading.Event()
        self.closing = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._refuse(request.spec, context)
        sequence = pb.GeneratedSequence(text="ab", token_ids=[7, 8], reason=pb.FINISH_REASON_STOP, stop_text="!", usage=USAGE)
        return pb.GenerateResponse(
            request_id="r1", model="m", model_digest="d", effective=pb.EffectiveParameters(seed=2**64 - 1, top_p=1.0), sequences=[sequence],
            usage=USAGE, timings=TIMINGS, num_recoveries=2,
        )

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        context.add_callback(self.cancelled.set)
        self._refuse(request.spec, context)
        if said(request.spec) == "endless":
            yield from (self._event(n + 1, tokens=pb.TokensEvent(first_token_offset=n, token_ids=[n], text="x")) for n in range(10**9))
        events = (
            {"accepted": pb.AcceptedEvent(request_id="r1", model="m", prompt_tokens=3, effective=pb.EffectiveParameters(seed=5))},
            {"progress": pb.ProgressEvent(phase=pb.PHASE_PREFILLING, prefill_done=1, prefill_total=3, elapsed=Duration(seconds=2))},
            {},  # a kind of event that this client does not know yet
            {"tokens": pb.TokensEvent(token_ids=[7, 8], text="é語" if said(request.spec) == "foreign" else "ab")},
            {"sequence_finished": pb.SequenceFinishedEvent(reason=pb.FINISH_REASON_STOP, stop_token_id=8, usage=USAGE)},
            {"completed": pb.CompletedEvent(usage=USAGE, timings=TIMINGS, num_recoveries=1)},
        )
        for seq, event in enumerate(events, 1):
            yield self._event(seq, **event)

    @staticmethod
    def _event(seq: int, **event: Any) -> pb.GenerateStreamResponse:
        return pb.GenerateStreamResponse(event=pb.StreamEvent(seq=seq, **event))

    def _refuse(self, spec: pb.GenerationSpec, context: grpc.ServicerContext) -> None:
        self.asked.append(spec)
        self.attempts += 1
        info = error_details_pb2.ErrorInfo(reason="FIELD_VIOLATION", domain="pagecast", metadata={"request_id": "r1"})
        if said(spec) == "bad":
            fields = [("spec.sampling.temperature", "must be at most 100, not 101"), ("spec.sampling.top_p", "must be above 0, not 0")]
            violations = [error_details_pb2.BadRequest.FieldViolation(field=field, description=text) for field, text in fields]
            bad = error_details_pb2.BadRequest(field_violations=violations)
            context.abort_with_status(refusal(code_pb2.INVALID_ARGUMENT, "2 fields are out of range", info, bad))
        if said(spec) == "busy" or (said(spec) == "flaky" and self.attempts < 3):
            info.reason = "OVERLOADED"
            retry = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=300_000_000))
            context.abort_with_status(refusal(code_pb2.UNAVAILABLE, "the queue is full", info, retry))
        if said(spec) == "slow":
            self.closing.wait()


class Others(tokenizer_pb2_grpc.TokenizerServiceServicer, model_pb2_grpc.ModelServiceServicer, runtime_pb2_grpc.RuntimeServiceServicer):
    """Tokens are code points; one model; a fixed load."""

    def Tokenize(self, request: tokenizer_pb2.TokenizeRequest, context: Any) -> tokenizer_pb2.TokenizeResponse:
        return tokenizer_pb2.TokenizeResponse(token_ids=map(ord, request.text))

    def Detokenize(self, request: tokenizer_pb2.DetokenizeRequest, context: Any) -> tokenizer_pb2.DetokenizeResponse:
        return tokenizer_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def RenderChat(self, request: tokenizer_pb2.RenderChatRequest, context: Any) -> tokenizer_pb2.RenderChatResponse:
        text = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
        return tokenizer_pb2.RenderChatResponse(text=text, token_ids=map(ord, text))

    def ListModels(self, request: Any, context: Any) -> model_pb2.ListModelsResponse:
        limits = model_pb2.ModelLimits(max_model_len=128, max_temperature=100.0)
        known = model_pb2.ModelCapabilities(chat=False)
        model = model_pb2.Model(name="m", vocab_size=9, end_token_ids=[2], limits=limits, capabilities=known)
        return model_pb2.ListModelsResponse(models=[model])

    def GetLoad(self, request: Any, context: Any) -> runtime_pb2.GetLoadResponse:
        return runtime_pb2.GetLoadResponse(
            instance_id="i", state=runtime_pb2.SERVING_STATE_SERVING, epoch=2, step=9, num_running=4, kv_utilization=0.5, prompt_tokens=11,
            output_tokens=12, device_us=500_000,
        )

    def GetServerInfo(self, request: Any, context: Any) -> runtime_pb2.GetServerInfoResponse:
        return runtime_pb2.GetServerInfoResponse(version="1", instance_id="i", epoch=3)


class FakeServer:
    """The script behind a real gRPC server on a free loopback port."""

    def __init__(self) -> None:
        self.script = Script()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.script, self._server)
        others = Others()
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(others, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(others, self._server)
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(others, self._server)
        self._health = checks = health.HealthServicer()
        checks.set("", health_pb2.HealthCheckResponse.SERVING)
        checks.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def health_is(self, status: str) -> None:
        """Of the whole server, by its name in grpc.health.v1."""
        self._health.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))

    def close(self) -> None:
        self.script.closing.set()
        self._server.stop(None).wait()
