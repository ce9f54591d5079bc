"""The gRPC server: transport options, listeners, and every service behind the error boundary."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagecast.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    runtime_pb2,
    runtime_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from pagecast_scheduler.frontend.boundary import Boundary
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.generation import GenerationServicer
from pagecast_scheduler.frontend.health import HealthServicer
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
HEALTH = "grpc.health.v1.Health"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class PortInUse(Exception):
    """The address cannot be listened on; the text is one line for the operator."""


def transport_options(config: FrontendConfig) -> list[tuple[str, int]]:
    """Channel arguments. Times in milliseconds.

    A silent peer is noticed after keepalive time plus timeout; peers may ping twice a second, also without a call.
    """
    return [
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", 1000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def listen(config: FrontendConfig) -> tuple[grpc.aio.Server, str]:
    """A server bound to its listeners, not yet started, and its address. Raises PortInUse."""
    server = grpc.aio.server(options=transport_options(config))
    host = f"[{config.host}]" if ":" in config.host and not config.host.startswith("[") else config.host
    wanted = f"{host}:{config.port}"
    try:
        port = server.add_insecure_port(wanted)
        if config.uds is not None:
            wanted = f"unix:{config.uds}"
            server.add_insecure_port(wanted)
    except RuntimeError:
        raise PortInUse(f"cannot listen on {wanted}: the address is in use or not available") from None
    return server, f"{host}:{port}"


def add_services(server: grpc.aio.Server, state: ServiceState, health: HealthServicer) -> None:
    """Registers everything this process serves."""
    boundary: Any = Boundary(server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(state), boundary)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(TokenizerServicer(state), boundary)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(state), boundary)
    runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(RuntimeServicer(state), boundary)
    health_pb2_grpc.add_HealthServicer_to_server(health, boundary)
    if state.config.reflection:
        _add_reflection(boundary)


def _add_reflection(boundary: Boundary) -> None:
    """One servicer under both names: v1 has the messages of v1alpha."""
    from grpc_reflection.v1alpha import reflection_pb2 as pb

    servicer = reflection.aio.ReflectionServicer((*SERVICES, HEALTH, *REFLECTION))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo, pb.ServerReflectionRequest.FromString, pb.ServerReflectionResponse.SerializeToString
    )
    for name in REFLECTION:
        boundary.add_service(name, {"ServerReflectionInfo": handler})
