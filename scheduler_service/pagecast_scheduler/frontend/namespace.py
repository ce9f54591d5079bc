"""Prefix-cache namespaces: derived here, so that no caller can choose another's.

namespace = HMAC-SHA256(secret of this cluster, principal, model digest, adapter, scope). The secret lives as long as the run directory.
"""

import hashlib
import hmac
import os
import secrets
from functools import lru_cache
from pathlib import Path

KEY_BYTES = 32


def load_key(run_dir: Path) -> bytes:
    """The cluster's secret; made by whichever front end comes first, whole from the moment it can be seen."""
    path = run_dir / "namespace.key"
    if not path.exists():
        fresh = run_dir / f".namespace.{secrets.token_hex(8)}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_bytes()


@lru_cache(maxsize=4096)
def derive(key: bytes, principal: str, model_digest: str, adapter: str, scope: str) -> bytes:
    """32 bytes. Each part is preceded by its length, so that no two different lists of parts give the same input."""
    parts = [part.encode() for part in (principal, model_digest, adapter, scope)]
    return hmac.new(key, b"".join(len(part).to_bytes(4, "little") + part for part in parts), hashlib.sha256).digest()
