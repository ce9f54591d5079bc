"""Configuration of one front end process. Values arrive checked for type by the command line; `check` says what cannot work."""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Everything a front end is told at start.

    model: path of a Hugging Face folder or a .gguf file whose tokenizer to use; "" means the byte-level tokenizer (the oracle
    executor has no model). served_model_name: the name clients use; None takes the worker's. port 0 lets the system choose;
    the address is published in RUN_DIR/frontend-<index>.address. uds: a Unix socket path to listen on as well;
    gateway_socket: so is RUN_DIR/frontend-<index>.sock, for an HTTP gateway of this host. Times in seconds.

    tls_cert, tls_key: PEM files of the server's chain and key; tls_client_ca: clients must show a certificate of it. auth_file:
    principals and hashed tokens. probe_port: health checks without credentials. admin_port: the operator's services over TCP, for
    callers with the admin role. frontend_metrics_port: loopback port of metrics, plus the front end's index. otlp_endpoint: URL of an
    OpenTelemetry collector. max_connections: None takes what the file limit allows. reflection: None is for loopback addresses alone.
    """

    run_dir: str
    model: str = ""
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    uds: str | None = None
    gateway_socket: bool = False
    index: int = 0
    reuse_port: bool = False
    reflection: bool | None = None
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    auth_file: str | None = None
    probe_host: str = "127.0.0.1"
    probe_port: int | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    frontend_metrics_port: int | None = None
    otlp_endpoint: str | None = None
    max_connections: int | None = None
    max_streams_per_connection: int = 1000
    max_request_s: float = 86_400.0
    max_message_bytes: int = 8 << 20
    max_metadata_bytes: int = 16 << 10
    drain_announce_s: float = 5.0
    drain_timeout_s: float = 30.0
    slow_consumer_timeout_s: float = 60.0
    max_detach_grace_s: float = 300.0
    log_format: str = "auto"
    log_level: str = "info"


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def shows_services(config: FrontendConfig) -> bool:
    """Whether the public listener tells strangers what there is to call."""
    return is_loopback(config.host) if config.reflection is None else config.reflection


def check(config: FrontendConfig) -> str | None:
    """One line saying what is wrong with the configuration, or None."""
    if not 0 <= config.port <= 65535:
        return f"port must be 0 to 65535, not {config.port}"
    if not 4096 <= config.max_message_bytes <= 1 << 30:
        return f"max_message_bytes must be 4096 to {1 << 30}, not {config.max_message_bytes}"
    if not 4096 <= config.max_metadata_bytes <= 1 << 20:
        return f"max_metadata_bytes must be 4096 to {1 << 20}, not {config.max_metadata_bytes}"
    if not 0 <= config.max_detach_grace_s <= 86_400:
        return f"max_detach_grace_s must be 0 to 86400, not {config.max_detach_grace_s}"
    if not 0 <= config.index < 1 << 16:
        return f"index must be 0 to {(1 << 16) - 1}, not {config.index}"
    if config.served_model_name == "":
        return "served_model_name must not be empty"
    if config.uds is not None and (problem := _socket_problem(config.uds)) is not None:
        return f"uds {problem}"
    return _check_listeners(config) or _check_limits(config)


def _socket_problem(path: str) -> str | None:
    """What a Unix socket's path must be, if it is not. gRPC takes addresses in UTF-8 alone."""
    if not path:
        return "must not be empty"
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"must be a path in UTF-8, not {path!a}"
    return None


def _check_limits(config: FrontendConfig) -> str | None:
    if config.max_connections is not None and not 1 <= config.max_connections <= 1 << 30:
        return f"max_connections must be at least 1 and at most {1 << 30}, not {config.max_connections}"
    if not 1 <= config.max_streams_per_connection <= 1 << 20:
        return f"max_streams_per_connection must be at least 1 and at most {1 << 20}, not {config.max_streams_per_connection}"
    if not 0 < config.max_request_s <= 31_536_000:
        return f"max_request_s must be more than 0 and at most 31536000, not {config.max_request_s:g}"
    for name in ("drain_announce_s", "drain_timeout_s", "slow_consumer_timeout_s"):
        if not 0 <= getattr(config, name) <= 86_400:
            return f"{name} must be 0 to 86400, not {getattr(config, name):g}"
    if config.frontend_metrics_port is not None and not 1 <= config.frontend_metrics_port + config.index <= 65535:
        return f"frontend_metrics_port must be 1 to 65535, not {config.frontend_metrics_port + config.index}"
    if config.otlp_endpoint is not None and not config.otlp_endpoint.startswith(("http://", "https://")):
        return f"otlp_endpoint must be an http:// or https:// URL, not {config.otlp_endpoint}"
    return None


def _check_listeners(config: FrontendConfig) -> str | None:
    """What would let strangers listen in or come in."""
    if (config.tls_cert is None) != (config.tls_key is None):
        return "tls_cert and tls_key go together: one is missing"
    if config.tls_client_ca is not None and config.tls_cert is None:
        return "tls_client_ca needs tls_cert and tls_key"
    for name, port in (("probe_port", config.probe_port), ("admin_port", config.admin_port)):
        if port is not None and not 0 <= port <= 65535:
            return f"{name} must be 0 to 65535, not {port}"
    if config.admin_port is not None and config.auth_file is None:
        return "admin_port needs auth_file: somebody must have the admin role"
    if config.tls_cert is None and not config.insecure:
        hosts = [config.host, *([config.admin_host] if config.admin_port is not None else [])]
        for host in hosts:
            if not is_loopback(host):
                return (
                    f"refusing to serve plaintext on {host}, which other machines can reach; give --tls-cert and --tls-key, "
                    "or pass --insecure if the network is trusted"
                )
    return None
