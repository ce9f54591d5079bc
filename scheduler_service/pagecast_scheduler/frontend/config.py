"""Configuration of one front end process. Values arrive checked for type by the command line; `check` says what cannot work."""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """Everything a front end is told at start.

    model: path of a Hugging Face folder or a .gguf file whose tokenizer to use; "" means the byte-level tokenizer (the oracle
    executor has no model). served_model_name: the name clients use; None takes the worker's. port 0 lets the system choose;
    the address is published in RUN_DIR/frontend-<index>.address. uds: a Unix socket path to listen on as well. Times in seconds.
    """

    run_dir: str
    model: str = ""
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    uds: str | None = None
    index: int = 0
    reuse_port: bool = False
    reflection: bool = True
    insecure: bool = False
    max_message_bytes: int = 8 << 20
    drain_announce_s: float = 5.0
    drain_timeout_s: float = 30.0
    slow_consumer_timeout_s: float = 60.0
    log_format: str = "auto"
    log_level: str = "info"


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check(config: FrontendConfig) -> str | None:
    """One line saying what is wrong with the configuration, or None."""
    if not 0 <= config.port <= 65535:
        return f"port must be 0 to 65535, not {config.port}"
    if config.max_message_bytes < 4096:
        return f"max_message_bytes must be at least 4096, not {config.max_message_bytes}"
    if config.index < 0:
        return f"index must be 0 or more, not {config.index}"
    if not is_loopback(config.host) and not config.insecure:
        return f"refusing to serve plaintext on {config.host}, which other machines can reach; pass --insecure if the network is trusted"
    return None
