"""Where the process listens, and what stands before the services there.

Three kinds, each a server of its own with its own room for connections, so that a flood of one leaves the others alone:
the public one (TCP, and Unix sockets if asked for); the operator's, a Unix socket in the run directory and a TCP port if asked for;
and the probes' one, plaintext, which answers health checks without credentials and nothing else.
"""

import os
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pagecast_scheduler.frontend.authorizer import Authorizer
from pagecast_scheduler.frontend.certificates import Certificates, server_credentials
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.file_limit import take_files
from pagecast_scheduler.frontend.interceptor import CallInterceptor
from pagecast_scheduler.frontend.metrics import FrontendMetrics
from pagecast_scheduler.frontend.principals import ANONYMOUS, OPERATOR, Principal
from pagecast_scheduler.frontend.reloading import Reloading
from pagecast_scheduler.frontend.tracing import Spans

MESSAGE_SLACK_BYTES = 1 << 20
"""A message too large by so little reaches our boundary, which says so with a reason; the transport refuses larger ones unread."""
RESERVED_FILES = 256
"""File descriptors kept for everything that is no client's connection."""
RESERVED_CONNECTIONS = 32
"""Connections that the operator's and the probes' listeners each have for themselves."""


class PortInUse(Exception):
    """The address cannot be listened on; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Guards:
    """What a listener needs besides the configuration."""

    authorizer: Authorizer
    certificates: Reloading[Certificates] | None
    metrics: FrontendMetrics
    spans: Spans
    load_trailer: Callable[[], tuple[str, bytes]]


@dataclass(slots=True)
class Listener:
    """A server bound to its addresses, not yet started."""

    server: grpc.aio.Server
    interceptor: CallInterceptor
    addresses: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]


def connection_cap(config: FrontendConfig, file_limit: int) -> int:
    """Connections of the public listener: as configured, else what the file limit leaves."""
    if config.max_connections is not None:
        return config.max_connections
    return max(16, file_limit - RESERVED_FILES - 2 * RESERVED_CONNECTIONS)


def transport_options(config: FrontendConfig, max_connections: int) -> list[tuple[str, int]]:
    """Channel arguments. Times in milliseconds.

    A silent peer is noticed after keepalive time plus timeout; peers may ping twice a second, also without a call. HTTP/2 lets a
    connection open twice the streams that we answer, so that our limiter says so, instead of the client queueing without a word.
    """
    return [
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.max_receive_message_length", config.max_message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        ("grpc.max_concurrent_streams", 2 * config.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Calls that have come in and that our loop has not taken up yet: beyond this gRPC drops some of anybody's with CANCELLED.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def listen_publicly(config: FrontendConfig, guards: Guards) -> Listener:
    """The listener of clients. Raises PortInUse."""
    cap = connection_cap(config, take_files())
    listener = _listener(config, guards, cap, None)
    credentials = None if guards.certificates is None else server_credentials(guards.certificates)
    _bind_tcp(listener, config.host, config.port, credentials)
    if config.uds is not None:
        _bind_unix(listener, Path(config.uds))
    if config.gateway_socket:
        _bind_unix(listener, Path(config.run_dir) / f"frontend-{config.index}.sock")
    return listener


def listen_for_operators(config: FrontendConfig, guards: Guards) -> list[Listener]:
    """The socket RUN_DIR/admin-<index>.sock, whose callers are the operator; and the TCP port, whose callers prove it. Raises PortInUse."""
    at_home = _listener(config, guards, RESERVED_CONNECTIONS, OPERATOR)
    _bind_unix(at_home, Path(config.run_dir) / f"admin-{config.index}.sock")
    if config.admin_port is None:
        return [at_home]
    far = _listener(config, guards, RESERVED_CONNECTIONS, None)
    credentials = None if guards.certificates is None else server_credentials(guards.certificates)
    _bind_tcp(far, config.admin_host, config.admin_port, credentials)
    return [at_home, far]


def listen_for_probes(config: FrontendConfig, guards: Guards) -> Listener | None:
    """The port for health checks without credentials, or None. Raises PortInUse."""
    if config.probe_port is None:
        return None
    listener = _listener(config, guards, RESERVED_CONNECTIONS, ANONYMOUS)
    _bind_tcp(listener, config.probe_host, config.probe_port, None)
    return listener


def _listener(config: FrontendConfig, guards: Guards, max_connections: int, principal: Principal | None) -> Listener:
    interceptor = CallInterceptor(
        guards.authorizer, guards.metrics, guards.spans, config.max_streams_per_connection, principal, guards.load_trailer
    )  # fmt: skip
    options = transport_options(config, max_connections)
    return Listener(grpc.aio.server(options=options), interceptor)


def _bind_tcp(listener: Listener, host: str, port: int, credentials: grpc.ServerCredentials | None) -> None:
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    wanted = f"{bracketed}:{port}"
    try:
        if credentials is None:
            bound = listener.server.add_insecure_port(wanted)
        else:
            bound = listener.server.add_secure_port(wanted, credentials)
    except RuntimeError:
        raise PortInUse(f"cannot listen on {wanted}: the address is in use or not available") from None
    listener.addresses.append(f"{bracketed}:{bound}")


def _bind_unix(listener: Listener, path: Path) -> None:
    """A socket that this user alone can open. One that a process still listens on is not taken from it, which gRPC would do."""
    why = _in_the_way(path)
    before = os.umask(0o077)
    try:
        if why is None:
            listener.server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        why = "the path is too long, taken, or in a folder that cannot be written"
    finally:
        os.umask(before)
    if why is not None:
        raise PortInUse(f"cannot listen on unix:{path}: {why}")
    listener.addresses.append(f"unix:{path}")


def _in_the_way(path: Path) -> str | None:
    """Why the path is not to be listened on; None where it is free, or a socket that nobody listens on any more."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return "what is there is no socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except TimeoutError:
        return "another process listens there"
    except OSError as error:
        return error.strerror or "it cannot be looked at"
    return "another process listens there"


def all_addresses(listeners: Sequence[Listener]) -> list[str]:
    """Every address of these listeners."""
    return [address for listener in listeners for address in listener.addresses]
