"""The server's certificate: read, checked, exchanged without a restart, and enforced on clients where a client CA is set."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.reloading import Reloading


class CertificateError(Exception):
    """The files cannot be used for TLS; the text is one line that names the file."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """A checked set. expires: the earliest end among the server's own chain."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    expires: datetime

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC uses for a handshake."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.client_ca)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"cannot read {path}: {error.strerror}") from None


def _chain(path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise CertificateError(f"{path} holds no PEM certificate") from None


def read(cert: Path, key: Path, client_ca: Path | None) -> Certificates:
    """The files' contents, checked. Raises CertificateError: not readable, not PEM, or a key of another certificate."""
    public_part, private = _bytes(cert), _bytes(key)
    authority = None if client_ca is None else _bytes(client_ca)
    chain = _chain(cert, public_part)
    if key.stat().st_mode & 0o007:
        raise CertificateError(f"{key} may be read by everyone; use mode 0600 or 0640")
    try:
        public = load_pem_private_key(private, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError(f"{key} holds no PEM private key without a password") from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if chain[0].public_key().public_bytes(*form) != public.public_bytes(*form):
        raise CertificateError(f"the key in {key} does not belong to the first certificate in {cert}")
    if client_ca is not None and authority is not None:
        _chain(client_ca, authority)
    expires = min(certificate.not_valid_after_utc for certificate in chain)
    return Certificates(public_part, private, authority, expires)


def watch(config: FrontendConfig) -> Reloading[Certificates] | None:
    """The configured certificates, followed as their files change; None for plaintext. Raises CertificateError."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert, key = Path(config.tls_cert), Path(config.tls_key)
    client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
    paths = [path for path in (cert, key, client_ca) if path is not None]
    try:
        return Reloading("certificates", paths, lambda: read(cert, key, client_ca))
    except OSError as error:
        raise CertificateError(f"cannot read {error.filename}: {error.strerror}") from None


def server_credentials(certificates: Reloading[Certificates]) -> grpc.ServerCredentials:
    """Credentials that ask for the current set at every handshake. With a client CA, a client without a certificate of it is refused."""
    first = last = certificates.value

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on a thread of its own; None keeps what it has."""
        nonlocal last
        current = certificates.value
        if current is last:
            return None
        last = current
        return current.configuration()

    return grpc.dynamic_ssl_server_credentials(first.configuration(), fetch, require_client_authentication=first.client_ca is not None)
