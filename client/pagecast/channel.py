"""How a channel is made: addresses, credentials, retry policy, and the health method. Shared by the synchronous and the asynchronous
client."""

import ipaddress
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import grpc
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from pagecast import access, types
from pagecast.errors import WrongAccess

DEFAULT_TARGET = "127.0.0.1:50051"

SERVICE_CONFIG: dict[str, Any] = json.loads(files("pagecast").joinpath("service_config.json").read_bytes())
"""What the server advises: spread calls over replicas that are healthy; try again before the first message of an answer (gRFC A6), and
only for the one status that says "not here, not now". A call of many requests is not: gRPC would keep all that it sent, and what is left
without a result is asked for in another call."""

_GRPC_SCHEME = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|google-c2p):(?!\d+$)")
_WATCH = {"service": "grpc.health.v1.Health", "method": "Watch"}
_HEALTH: dict[int, types.HealthStatus] = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


class Connection(NamedTuple):
    """What a channel is opened with. credentials: None for plaintext. metadata: sent with every call."""

    target: str
    credentials: grpc.ChannelCredentials | None
    options: list[tuple[str, Any]]
    metadata: tuple[tuple[str, str], ...]


def connection(
    endpoints: str | Sequence[str], tls: access.Tls | bool | None, token: str | None, credentials: grpc.ChannelCredentials | None,
    metadata: Sequence[tuple[str, str]], options: Sequence[tuple[str, Any]],
) -> Connection:  # fmt: skip
    """A client's arguments, see Client. Raises ValueError where they do not go together, WrongAccess where one cannot be used."""
    target, chosen = target_of(endpoints), access.tls_of(tls)
    if chosen is not None:
        if credentials is not None:
            raise ValueError("tls and credentials are two ways to say the same; give one")
        credentials, options = chosen.credentials(), [*options, *chosen.options()]
    arguments = channel_options(options, checks_health=token is None and are_replicas(endpoints))
    return Connection(target, credentials, arguments, (*access.token_metadata(target, token, credentials is not None), *metadata))


def health_method(grpc_channel: Any) -> Any:
    """The health check of a synchronous or asynchronous channel."""
    return grpc_channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=StringValue.SerializeToString, response_deserializer=UInt32Value.FromString
    )


def health_watch_method(grpc_channel: Any) -> Any:
    """The health watch: the one method that is not tried again, see `service_config`."""
    return grpc_channel.unary_stream(
        f"/{_WATCH['service']}/{_WATCH['method']}", request_serializer=StringValue.SerializeToString,
        response_deserializer=UInt32Value.FromString,
    )


def health_request(service: str) -> StringValue:
    """What the health method is asked; "" asks for the whole server."""
    # HealthCheckRequest is {string service = 1} and HealthCheckResponse {enum status = 1}: on the wire the same as these two
    # well-known messages, so that checking health needs no further package.
    return StringValue(value=service)


def health_status(message: UInt32Value) -> types.HealthStatus:
    """Its answer; "UNKNOWN" for a status that this version does not know."""
    return _HEALTH.get(message.value, "UNKNOWN")


def target_of(endpoints: str | Sequence[str]) -> str:
    """One gRPC target for one endpoint or several. An endpoint is HOST:PORT, unix:PATH, or any gRPC target.

    Raises WrongAccess for what is none of these, which gRPC would take for an address of its own choice, and for several endpoints that
    are not IP addresses of one family, which gRPC cannot balance over by itself.
    """
    if isinstance(endpoints, str):
        return _checked(endpoints)
    if len(endpoints) == 1:
        return _checked(endpoints[0])
    families = set()
    for endpoint in endpoints:
        host = endpoint.rpartition(":")[0].strip("[]")
        try:
            families.add(ipaddress.ip_address(host).version)
        except ValueError:
            raise WrongAccess(f"several endpoints must be IP addresses with ports; {endpoint!r} is not") from None
    if len(families) != 1:
        raise WrongAccess("several endpoints must be of one family, IPv4 or IPv6, and at least one must be given")
    return f"ipv{families.pop()}:{','.join(endpoints)}"


def _checked(endpoint: str) -> str:
    try:
        endpoint.encode()
    except UnicodeEncodeError:
        raise WrongAccess(f"an endpoint must be text in UTF-8, not {endpoint!a}") from None
    if _GRPC_SCHEME.match(endpoint):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if not host or "/" in endpoint or not port.isdecimal() or not 0 < int(port[:9]) < 65536:
        raise WrongAccess(f"an endpoint is HOST:PORT or unix:PATH, not {endpoint!r}")
    return endpoint


def are_replicas(endpoints: str | Sequence[str]) -> bool:
    """Whether there is more than one server to choose from."""
    return not isinstance(endpoints, str) and len(endpoints) > 1


def service_config(checks_health: bool) -> dict[str, Any]:
    """The advice as this client takes it: without a replica to turn to, an unhealthy server is asked all the same and says why; and a
    call fails when no server is there, instead of waiting for one. A health watch is not tried again."""
    methods = [{key: value for key, value in method.items() if key != "waitForReady"} for method in SERVICE_CONFIG["methodConfig"]]
    chosen = {key: value for key, value in SERVICE_CONFIG.items() if checks_health or key != "healthCheckConfig"}
    return chosen | {"methodConfig": [*methods, {"name": [_WATCH]}]}


def channel_options(extra: Sequence[tuple[str, Any]] = (), *, checks_health: bool = False) -> list[tuple[str, Any]]:
    """Channel arguments: retries, round robin, keepalive that notices a peer that hangs, and room for long answers. checks_health: calls
    go to replicas alone that gRPC's own health checks find healthy; those bear no token."""
    return [
        ("grpc.service_config", json.dumps(service_config(checks_health))),
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        *extra,
    ]
