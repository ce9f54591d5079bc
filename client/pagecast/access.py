"""How a client gets in: TLS files and a bearer token. Shared by both clients and the commands."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import grpc

from pagecast.errors import WrongAccess


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to trust and what to show. Paths of PEM files.

    ca: the authority of the server's certificate; None takes the system's. cert, key: a client certificate, where the server wants
    one. server_name: the name to expect in the server's certificate, where it is not that of the address.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel. Raises WrongAccess: a certificate without its key, or a file that cannot be read."""
        if (self.cert is None) != (self.key is None):
            raise WrongAccess("a client certificate and its key go together: one is missing")
        self._check()
        return grpc.ssl_channel_credentials(*(None if path is None else _read(path) for path in (self.ca, self.key, self.cert)))

    def _check(self) -> None:
        """gRPC says of a file that it cannot use no more than that a handshake fails."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca is not None:
                context.load_verify_locations(cadata=_read(self.ca).decode("ascii", "replace"))
        except ssl.SSLError:
            raise WrongAccess(f"{self.ca} holds no PEM certificate") from None
        if self.cert is not None and self.key is not None:
            load_pair(context, self.cert, self.key)

    def options(self) -> list[tuple[str, str]]:
        """Channel arguments."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Gives a context a certificate and its key. Raises WrongAccess for files that are no such pair."""
    for path in (cert, key):
        _read(path)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        why = "do not belong together" if "MISMATCH" in str(error) else "are not a certificate and its key in PEM"
        raise WrongAccess(f"{cert} and {key} {why}") from None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise WrongAccess(f"cannot read {path}: {error.strerror}") from None


def tls_of(tls: "Tls | bool | None") -> Tls | None:
    """True stands for TLS with the system's authorities."""
    return Tls() if tls is True else tls or None


def tls_from(
    encrypted: bool, ca: str | None = None, cert: str | None = None, key: str | None = None, server_name: str | None = None
) -> Tls | None:  # fmt: skip
    """What separate options ask for: each of the others means `encrypted` too."""
    return Tls(ca, cert, key, server_name) if encrypted or any((ca, cert, key, server_name)) else None


def token_metadata(target: str, token: str | None, is_encrypted: bool) -> Sequence[tuple[str, str]]:
    """The metadata that carries a token. Raises WrongAccess where it would cross a network in plaintext, or is no token."""
    if token is None:
        return ()
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise WrongAccess("a token is a word of printable ASCII characters")
    if not is_encrypted and not stays_here(target):
        raise WrongAccess(f"a token is not sent to {target} in plaintext; use TLS")
    return (("authorization", f"Bearer {token}"),)


def stays_here(target: str) -> bool:
    """Whether a gRPC target can only be on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").lstrip("/")
    return all(_is_loopback(part.rpartition(":")[0] or part) for part in address.split(","))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
