"""Clients of other projects' protocols, with their own published stubs: `python compat_client.py SCENARIO HOST:PORT` exits 0 if it holds.

A process of its own, because a process can hold one definition of a protocol, and the front end holds ours. The oracle says which
tokens must come.
"""

import sys
from collections.abc import Callable
from typing import Any

import grpc
import tritonclient.grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tritonclient.utils import InferenceServerException

from pagecast import Client
from pagecast_worker.oracle import oracle_tokens

PROMPT = [5, 6, 7]
LIMIT_S = 60


def failure(call: Callable[[], Any]) -> Any:
    """The error that a call must end with."""
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call did not fail")


def ask(request_id: str = "", stream: bool = True, **params: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 3, **params})
    return pb.GenerateRequest(
        request_id=request_id, tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=sampling, stream=stream
    )


def tokens_come_in_chunks_and_whole(engine: Any) -> None:
    expected = oracle_tokens(PROMPT, 6, seed=3)
    answers = list(engine.Generate(ask(), timeout=LIMIT_S))
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert chunks[-1].completion_tokens == 6 and chunks[0].prompt_tokens == 3
    (complete,) = [answer.complete for answer in answers if answer.HasField("complete")]
    assert (list(complete.output_ids), complete.finish_reason, complete.completion_tokens) == (expected, "length", 6)
    (alone,) = engine.Generate(ask(stream=False), timeout=LIMIT_S)
    assert alone.complete == complete


def a_stop_token_and_several_sequences(engine: Any) -> None:
    expected = oracle_tokens(PROMPT, 6, seed=3)
    (stopped,) = engine.Generate(ask(stream=False, stop_token_ids=[expected[3]]), timeout=LIMIT_S)
    assert stopped.complete.finish_reason == "stop" and stopped.complete.matched_token_id == expected[3]
    both = list(engine.Generate(ask(stream=False, n=2), timeout=LIMIT_S))
    assert sorted(answer.complete.index for answer in both) == [0, 1]


def what_we_do_not_do_is_refused_by_name(engine: Any) -> None:
    for request, field in (
        (ask(truncate_prompt_tokens=4), "truncate_prompt_tokens"),
        (ask(structural_tag="x"), "structural_tag"),
        (ask(logprobs=-1), "logprobs"),
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
    ):
        error = failure(lambda request=request: list(engine.Generate(request, timeout=LIMIT_S)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and field in error.details()


def abort_ends_a_stream_and_passes_over_strangers(engine: Any) -> None:
    call = engine.Generate(ask("to-be-aborted", max_tokens=4000), timeout=LIMIT_S)
    next(call)
    engine.Abort(pb.AbortRequest(request_ids=["nobody", "to-be-aborted"]), timeout=LIMIT_S)
    assert failure(lambda: list(call)).code() is grpc.StatusCode.CANCELLED


def the_engine_says_what_it_is_and_how_loaded(engine: Any) -> None:
    assert engine.HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S).healthy
    model = engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=LIMIT_S)
    assert model.is_generation and model.served_model_name == "oracle" and model.max_context_length == 4096 and model.vocab_size > 0
    server = engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=LIMIT_S)
    assert server.server_type == "pagecast" and server.max_num_seqs == 256 and server.uptime_seconds > 0
    (load,) = engine.GetLoads(pb.GetLoadsRequest(), timeout=LIMIT_S).loads
    assert load.max_running_requests == 256 and 0 <= load.token_usage <= 1 and load.max_total_num_tokens > 0


def the_open_inference_protocol_knows_the_server_and_its_model(address: str) -> None:
    with Client(address) as ours:
        digest = ours.models()[0].digest
    with tritonclient.grpc.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("oracle", digest)
        assert client.get_server_metadata().name == "pagecast"
        described = client.get_model_metadata("oracle")
        assert (described.name, list(described.versions), described.platform) == ("oracle", [digest], "pagecast")
        try:
            client.get_model_metadata("nobody")
        except InferenceServerException as unknown:
            assert "NOT_FOUND" in str(unknown.status())
        else:
            raise AssertionError("a model that is not there was described")


OF_AN_ENGINE = (
    a_stop_token_and_several_sequences,
    what_we_do_not_do_is_refused_by_name,
    abort_ends_a_stream_and_passes_over_strangers,
    the_engine_says_what_it_is_and_how_loaded,
)


def main() -> None:
    scenario, address = sys.argv[1:]
    if scenario == "the_open_inference_protocol_knows_the_server_and_its_model":
        the_open_inference_protocol_knows_the_server_and_its_model(address)
        return
    with grpc.insecure_channel(address) as channel:
        {each.__name__: each for each in OF_AN_ENGINE}[scenario](vllm_engine_pb2_grpc.VllmEngineStub(channel))


if __name__ == "__main__":
    main()
