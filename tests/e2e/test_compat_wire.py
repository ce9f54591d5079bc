"""Other projects' protocols, spoken by their own published stubs: a router for vLLM's engines, and Triton's client for the Open Inference
Protocol. The oracle says which tokens must come."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from e2e.cli_server import Served, serve
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tritonclient.utils import InferenceServerException

from pagecast import Client
from pagecast_worker.oracle import oracle_tokens

PROMPT = [5, 6, 7]
LIMIT_S = 60


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--max-model-len", "4096") as running:
        yield running


@pytest.fixture
def engine(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(request_id: str = "", stream: bool = True, **params: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 3, **params})
    return pb.GenerateRequest(
        request_id=request_id, tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=sampling, stream=stream
    )


def test_tokens_come_in_chunks_and_whole(engine: Any) -> None:
    expected = oracle_tokens(PROMPT, 6, seed=3)
    answers = list(engine.Generate(ask(), timeout=LIMIT_S))
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert chunks[-1].completion_tokens == 6 and chunks[0].prompt_tokens == 3
    (complete,) = [answer.complete for answer in answers if answer.HasField("complete")]
    assert (list(complete.output_ids), complete.finish_reason, complete.completion_tokens) == (expected, "length", 6)
    (alone,) = engine.Generate(ask(stream=False), timeout=LIMIT_S)
    assert alone.complete == complete


def test_a_stop_token_and_several_sequences(engine: Any) -> None:
    expected = oracle_tokens(PROMPT, 6, seed=3)
    (stopped,) = engine.Generate(ask(stream=False, stop_token_ids=[expected[3]]), timeout=LIMIT_S)
    assert stopped.complete.finish_reason == "stop" and stopped.complete.matched_token_id == expected[3]
    both = list(engine.Generate(ask(stream=False, n=2), timeout=LIMIT_S))
    assert sorted(answer.complete.index for answer in both) == [0, 1]


def test_what_we_do_not_do_is_refused_by_name(engine: Any) -> None:
    for request, field in (
        (ask(truncate_prompt_tokens=4), "truncate_prompt_tokens"),
        (ask(structural_tag="x"), "structural_tag"),
        (ask(logprobs=-1), "logprobs"),
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(engine.Generate(request, timeout=LIMIT_S))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and field in error.details()


def test_abort_ends_a_stream_and_passes_over_strangers(engine: Any) -> None:
    call = engine.Generate(ask("to-be-aborted", max_tokens=4000), timeout=LIMIT_S)
    next(call)
    engine.Abort(pb.AbortRequest(request_ids=["nobody", "to-be-aborted"]), timeout=LIMIT_S)
    with pytest.raises(grpc.RpcError) as ended:
        for _ in call:
            pass
    error: Any = ended.value
    assert error.code() is grpc.StatusCode.CANCELLED


def test_the_engine_says_what_it_is_and_how_loaded(engine: Any) -> None:
    assert engine.HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S).healthy
    model = engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=LIMIT_S)
    assert model.is_generation and model.served_model_name == "oracle" and model.max_context_length == 4096 and model.vocab_size > 0
    server = engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=LIMIT_S)
    assert server.server_type == "pagecast" and server.max_num_seqs == 256 and server.uptime_seconds > 0
    (load,) = engine.GetLoads(pb.GetLoadsRequest(), timeout=LIMIT_S).loads
    assert load.max_running_requests == 256 and 0 <= load.token_usage <= 1 and load.max_total_num_tokens > 0


def test_the_open_inference_protocol_knows_the_server_and_its_model(served: Served) -> None:
    with Client(served.address) as ours:
        digest = ours.models()[0].digest
    with tritonclient.grpc.InferenceServerClient(served.address) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("oracle", digest)
        assert client.get_server_metadata().name == "pagecast"
        described = client.get_model_metadata("oracle")
        assert (described.name, list(described.versions), described.platform) == ("oracle", [digest], "pagecast")
        with pytest.raises(InferenceServerException) as unknown:
            client.get_model_metadata("nobody")
        assert "NOT_FOUND" in str(unknown.value.status())
