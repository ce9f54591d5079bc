"""The gateway's certificate: checked before it listens, and exchanged for new connections when its files change."""

import ssl
from pathlib import Path

from pagecast.access import load_pair
from pagecast.errors import WrongAccess
from pagecast_scheduler.frontend.reloading import Reloading
from pagecast_scheduler.gateway.config import GatewayConfig


def _read(cert: str, key: str) -> ssl.SSLContext:
    """Raises WrongAccess: not readable, not PEM, a key of another certificate, or one that everyone may read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(context, cert, key)
    if Path(key).stat().st_mode & 0o007:
        raise WrongAccess(f"{key} may be read by everyone; use mode 0600 or 0640")
    return context


def listening_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """What connections are accepted with, each with what the files hold then; None for plain HTTP. Raises WrongAccess."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = config.tls_cert, config.tls_key
    try:
        current = Reloading("certificate", [Path(cert), Path(key)], lambda: _read(cert, key))
    except OSError as error:
        raise WrongAccess(f"cannot read {error.filename}: {error.strerror}") from None
    first = current.value

    def choose(handshake: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Called when a client has said hello, whether it names a server or not."""
        handshake.context = current.value

    first.sni_callback = choose
    return first
