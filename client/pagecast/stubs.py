"""The services of one channel, as whatever asks them needs them: the clients here and the gateway."""

from typing import Any

from pagecast.channel import health_method
from pagecast.v1 import generation_pb2_grpc, model_pb2_grpc, runtime_pb2_grpc, tokenizer_pb2_grpc


class Stubs:
    """Of a synchronous or an asynchronous channel: its kind is that of the calls. health: the method Check of grpc.health.v1."""

    def __init__(self, grpc_channel: Any) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(grpc_channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(grpc_channel)
        self.models = model_pb2_grpc.ModelServiceStub(grpc_channel)
        self.runtime = runtime_pb2_grpc.RuntimeServiceStub(grpc_channel)
        self.health = health_method(grpc_channel)
