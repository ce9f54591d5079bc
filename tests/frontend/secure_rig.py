"""Certificates, files of principals and channels for tests of a front end behind TLS and tokens."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import trustme


@dataclass
class Authority:
    """A certificate authority whose files lie in a folder."""

    ca: trustme.CA
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        made = cls(trustme.CA(), folder)
        made.ca.cert_pem.write_to_path(str(folder / "ca.pem"))
        return made

    def issue(self, name: str, *identities: str, **options: Any) -> tuple[str, str]:
        """Paths of a certificate chain and its key, written whole from the moment they can be seen."""
        cert = self.ca.issue_cert(*identities, **options)
        chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
        return write(self.folder / f"{name}.pem", chain), write(self.folder / f"{name}.key", cert.private_key_pem.bytes())

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()


def write(path: Path, data: bytes, mode: int = 0o600) -> str:
    """Puts a file in place of the one that is there; its times differ from the old one's."""
    fresh = path.with_suffix(path.suffix + ".fresh")
    fresh.write_bytes(data)
    fresh.chmod(mode)
    os.replace(fresh, path)
    return str(path)


def token(name: str) -> str:
    """The token of a made-up secret."""
    return f"pagecast.id-{name}.secret-of-{name}"


def entry(name: str, principal: str = "", expires: datetime | None = None) -> str:
    digest = hashlib.sha256(f"secret-of-{name}".encode()).hexdigest()
    end = f'expires = {expires.astimezone(UTC).isoformat()}\n' if expires else ""
    return f'[[token]]\nprincipal = "{principal or name}"\nid = "id-{name}"\nsha256 = "{digest}"\n{end}'


def bearer(name: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {token(name)}"),)


def auth_file(folder: Path, text: str, mode: int = 0o600) -> str:
    return write(folder / "auth.toml", text.encode(), mode)


def secure_channel(address: str, root: bytes, client: tuple[str, str] | None = None) -> grpc.aio.Channel:
    """A TLS channel; client: paths of the certificate chain and key to show."""
    chain, key = (Path(path).read_bytes() for path in client) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    # A channel of its own connection, so that each handshake is a new one.
    return grpc.aio.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)])

