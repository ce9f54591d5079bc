"""Configuration of the HTTP gateway process. Values arrive checked for type by the command line; `check` says what cannot work."""

from dataclasses import dataclass

from pagecast.access import Tls, stays_here, tls_from
from pagecast_scheduler.frontend.config import is_loopback


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway is told at start.

    target: gRPC addresses of the front ends, separated by commas. http_port: None is 8000, 0 lets the system choose; reuse_port: the
    port may be bound elsewhere as well. publish: a file that gets the address once it is listened on. max_message_bytes: largest
    request body. http_arrival_s: seconds for the head of a request to come, and for each further part of its body.
    slow_consumer_timeout_s: seconds without its client taking anything after which a connection with unread output is ended.
    drain_announce_s, drain_timeout_s: after a signal, seconds of NOT_SERVING in which calls are still taken, and then seconds for those
    that are open. tls_cert, tls_key: PEM files; HTTPS is spoken with them. target_tls: front ends are spoken to over TLS; target_ca,
    target_cert, target_key: PEM files of the authority that they are trusted by and of the certificate that they are shown, which mean
    it too; target_name: the name to expect in their certificates.
    """

    target: str
    host: str = "127.0.0.1"
    http_port: int | None = None
    insecure: bool = False
    reuse_port: bool = False
    publish: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    target_tls: bool = False
    target_ca: str | None = None
    target_cert: str | None = None
    target_key: str | None = None
    target_name: str | None = None
    max_message_bytes: int = 8 << 20
    http_arrival_s: float = 30.0
    slow_consumer_timeout_s: float = 60.0
    drain_announce_s: float = 5.0
    drain_timeout_s: float = 30.0
    log_format: str = "auto"
    log_level: str = "info"

    @property
    def port(self) -> int:
        """The port that was asked for."""
        return 8000 if self.http_port is None else self.http_port

    @property
    def access(self) -> Tls | None:
        """How front ends are reached; None is plaintext."""
        return tls_from(self.target_tls, self.target_ca, self.target_cert, self.target_key, self.target_name)

    @property
    def plaintext_targets(self) -> list[str]:
        """Front ends to which callers' tokens and prompts cross a network unencrypted, as far as this process can tell."""
        return [] if self.access is not None else [target for target in self.target.split(",") if not stays_here(target)]


def check(config: GatewayConfig) -> str | None:
    """One line saying what is wrong with the configuration, or None."""
    if not all(config.target.split(",")):
        return "target must be one or more addresses, separated by commas"
    if not 0 <= config.port <= 65535:
        return f"http_port must be 0 to 65535, not {config.http_port}"
    if not 4096 <= config.max_message_bytes <= 1 << 30:
        return f"max_message_bytes must be 4096 to {1 << 30}, not {config.max_message_bytes}"
    if not 0 < config.http_arrival_s <= 86_400:
        return f"http_arrival_s must be more than 0 and at most 86400, not {config.http_arrival_s:g}"
    for name in ("drain_announce_s", "drain_timeout_s", "slow_consumer_timeout_s"):
        if not 0 <= getattr(config, name) <= 86_400:
            return f"{name} must be 0 to 86400, not {getattr(config, name):g}"
    if (config.tls_cert is None) != (config.tls_key is None):
        return "tls_cert and tls_key go together"
    if (config.target_cert is None) != (config.target_key is None):
        return "target_cert and target_key go together"
    if not is_loopback(config.host) and config.tls_cert is None and not config.insecure:
        return f"refusing to serve plain HTTP on {config.host}, which other machines can reach; give --tls-cert, or --insecure"
    return None
