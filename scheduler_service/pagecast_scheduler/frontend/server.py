"""The services of each listener, every one behind the error boundary."""

from typing import Any

import grpc
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1.channelz import aio as channelz
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagecast.v1 import (
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    runtime_pb2,
    runtime_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from pagecast_scheduler.frontend.admin_service import AdminServicer
from pagecast_scheduler.frontend.boundary import Boundary
from pagecast_scheduler.frontend.compat import open_inference_pb2, open_inference_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from pagecast_scheduler.frontend.compat.open_inference import OpenInferenceServicer
from pagecast_scheduler.frontend.compat.vllm_engine import VllmEngineServicer
from pagecast_scheduler.frontend.config import shows_services
from pagecast_scheduler.frontend.generation import GenerationServicer
from pagecast_scheduler.frontend.health import HealthServicer
from pagecast_scheduler.frontend.listeners import Listener
from pagecast_scheduler.frontend.load_reports import ORCA, OrcaServicer, add_orca
from pagecast_scheduler.frontend.model_service import ModelServicer
from pagecast_scheduler.frontend.runtime_service import RuntimeServicer
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_scheduler.frontend.tokenizer_service import TokenizerServicer

SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (generation_pb2, "GenerationService"),
        (tokenizer_pb2, "TokenizerService"),
        (model_pb2, "ModelService"),
        (runtime_pb2, "RuntimeService"),
    )
)
"""Our own services on the public listener."""
COMPAT = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in ((vllm_engine_pb2, "VllmEngine"), (open_inference_pb2, "GRPCInferenceService"))
)
"""Other projects' services, beside ours."""
ADMIN = "pagecast.v1.AdminService"
HEALTH = "grpc.health.v1.Health"
CHANNELZ = "grpc.channelz.v1.Channelz"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Services:
    """One servicer for each service, however many listeners offer it."""

    def __init__(self, state: ServiceState, health: HealthServicer) -> None:
        self._has_reflection = shows_services(state.config)
        self._max_message_bytes = state.config.max_message_bytes
        self._generation = GenerationServicer(state)
        self._tokenizer = TokenizerServicer(state)
        self._models = ModelServicer(state)
        self._runtime = RuntimeServicer(state)
        self._admin = AdminServicer(state)
        self._orca = OrcaServicer(state)
        self._health = health
        self._vllm = VllmEngineServicer(state, self._generation)
        self._open_inference = OpenInferenceServicer(state)

    def add_public(self, listener: Listener) -> None:
        """What clients, routers and meshes call."""
        boundary: Any = Boundary(listener.server, self._max_message_bytes, listener.interceptor.around)
        self._add_ours(boundary)
        if self._has_reflection:
            _add_reflection(boundary, (*SERVICES, *COMPAT, HEALTH, ORCA))

    def add_operator(self, listener: Listener) -> None:
        """All of the public services, and what only an operator may call."""
        boundary: Any = Boundary(listener.server, self._max_message_bytes, listener.interceptor.around)
        self._add_ours(boundary)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, boundary)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.ChannelzServicer(), boundary)
        _add_reflection(boundary, (*SERVICES, *COMPAT, ADMIN, HEALTH, ORCA, CHANNELZ))

    def add_probe(self, listener: Listener) -> None:
        """Health checks and nothing else."""
        boundary: Any = Boundary(listener.server, self._max_message_bytes, listener.interceptor.around)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, boundary)

    def _add_ours(self, boundary: Any) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, boundary)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._tokenizer, boundary)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self._models, boundary)
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self._runtime, boundary)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, boundary)
        add_orca(boundary, self._orca)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm, boundary)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self._open_inference, boundary)


def _add_reflection(boundary: Boundary, names: tuple[str, ...]) -> None:
    """One servicer under both names: v1 has the messages of v1alpha."""
    from grpc_reflection.v1alpha import reflection_pb2 as pb

    servicer = reflection.aio.ReflectionServicer((*names, *REFLECTION))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo, pb.ServerReflectionRequest.FromString, pb.ServerReflectionResponse.SerializeToString
    )
    for name in REFLECTION:
        boundary.add_service(name, {"ServerReflectionInfo": handler})
