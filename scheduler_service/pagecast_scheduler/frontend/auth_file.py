"""The file of principals and hashed tokens: TOML in, a table of principals out. The format is described in docs/security.md.

A token is `pagecast.ID.SECRET`. The file holds its id and the SHA-256 of its secret; the secret is 256 random bits, so that a fast
hash is enough and the file alone gives nobody access.
"""

import hashlib
import hmac
import os
import stat
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.principals import Principal, Quota, Role
from pagecast_wire.intake import Priority

log = structlog.get_logger("pagecast.frontend")

_PRINCIPAL_KEYS = {"tenant", "roles", "streams", "queued_requests", "tokens_per_minute", "max_priority", "models", "sans"}
_TOKEN_KEYS = {"principal", "id", "sha256", "expires"}
_NOBODY = "0" * 64
"""What an unknown id is compared with, so that it takes as long as a known one."""


class AuthFileError(Exception):
    """The file cannot be used; the text is one line that names the file and the key."""


@dataclass(frozen=True, slots=True)
class Token:
    """One entry: whose it is, the hex SHA-256 of its secret, when it ends (None: never)."""

    principal: Principal
    sha256: str
    expires: datetime | None


@dataclass(frozen=True, slots=True)
class AuthTable:
    """Tokens by id, and principals by subject alternative name of a client certificate."""

    tokens: dict[str, Token]
    sans: dict[str, Principal]

    def of_token(self, text: str, now: datetime) -> Principal:
        """The principal of a bearer token. Raises Refusal; neither its time nor its text tells a wrong id from a wrong secret."""
        prefix, _, rest = text.partition(".")
        token_id, _, secret = rest.partition(".")
        token = self.tokens.get(token_id)
        given = hashlib.sha256(secret.encode()).hexdigest()
        is_right = hmac.compare_digest(given, token.sha256 if token is not None else _NOBODY)
        if prefix != "pagecast" or token is None or not is_right:
            raise Refusal(Reason.TOKEN_INVALID)
        if token.expires is not None and token.expires <= now:
            raise Refusal(Reason.TOKEN_EXPIRED)
        return token.principal


def read(path: Path) -> AuthTable:
    """The table in the file. Raises AuthFileError: not readable, open to others, or not as described."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise AuthFileError(f"cannot read the auth file {path}: {error.strerror}") from None
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        mode = stat.S_IMODE(status.st_mode)
        text = f"the auth file {path} has mode {mode:04o}: others may not read it and the group may not write it; use 0600 or 0640"
        raise AuthFileError(text)
    try:
        table = parse(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, _Wrong) as error:
        raise AuthFileError(f"the auth file {path} is not valid: {error}") from None
    if not table.tokens and not table.sans:
        log.warning("the auth file holds no token and no certificate's name: nobody may ask", path=str(path))
    return table


class _Wrong(Exception):
    """What is wrong with a value, naming its key."""


def parse(text: str) -> AuthTable:
    """The table in a TOML text. Raises tomllib.TOMLDecodeError or an exception whose text names the key."""
    data = tomllib.loads(text)
    _only(data, {"principal", "token"}, "")
    principals: dict[str, Principal] = {}
    sans: dict[str, Principal] = {}
    for name, fields in _tables(data.get("principal", {}), "principal").items():
        principal = principals[name] = _principal(name, fields)
        for san in _strings(fields, "sans", f"principal.{name}"):
            if san in sans:
                raise _Wrong(f"principal.{name}.sans: {san!r} already belongs to {sans[san].name!r}")
            sans[san] = principal
    tokens: dict[str, Token] = {}
    entries = data.get("token", [])
    if not isinstance(entries, list):
        raise _Wrong("token: must be written [[token]]")
    for number, entry in enumerate(entries):
        token_id, token = _token(entry, principals, f"token[{number}]")
        if token_id in tokens:
            raise _Wrong(f"token[{number}].id: {token_id!r} is there twice")
        tokens[token_id] = token
    return AuthTable(tokens, sans)


def _principal(name: str, fields: dict[str, Any]) -> Principal:
    path = f"principal.{name}"
    _only(fields, _PRINCIPAL_KEYS, path)
    if not 0 < len(name) <= 128 or not name.isprintable():
        raise _Wrong(f"{path}: a name has 1 to 128 printable characters")
    roles = _strings(fields, "roles", path) if "roles" in fields else [Role.INFER.value]
    if unknown := set(roles) - {role.value for role in Role}:
        raise _Wrong(f"{path}.roles: there is no role {min(unknown)!r}; there are {', '.join(role.value for role in Role)}")
    tenant = fields.get("tenant", name)
    if not isinstance(tenant, str) or not 0 < len(tenant) <= 128:
        raise _Wrong(f"{path}.tenant: must be a text of 1 to 128 characters")
    priority = fields.get("max_priority", "interactive")
    if not isinstance(priority, str) or priority.upper() not in Priority.__members__:
        raise _Wrong(f"{path}.max_priority: must be one of {', '.join(p.name.lower() for p in Priority)}")
    quota = Quota(*(_count(fields, key, path) for key in ("streams", "queued_requests", "tokens_per_minute")))
    return Principal(
        name, tenant, frozenset(map(Role, roles)), quota, Priority[priority.upper()], frozenset(_strings(fields, "models", path))
    )


def _token(entry: Any, principals: dict[str, Principal], path: str) -> tuple[str, Token]:
    if not isinstance(entry, dict):
        raise _Wrong(f"{path}: must be a table")
    _only(entry, _TOKEN_KEYS, path)
    for key in ("principal", "id", "sha256"):
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise _Wrong(f"{path}.{key}: must be a text")
    digest = entry["sha256"].lower()
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise _Wrong(f"{path}.sha256: must be 64 hexadecimal digits")
    principal = principals.get(entry["principal"])
    if principal is None:
        raise _Wrong(f"{path}.principal: there is no [principal.{entry['principal']}]")
    expires = entry.get("expires")
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise _Wrong(f"{path}.expires: must be a time with its zone, such as {datetime.now(UTC).year + 1}-01-01T00:00:00Z")
    return entry["id"], Token(principal, digest, expires)


def _only(fields: dict[str, Any], known: set[str], path: str) -> None:
    if unknown := set(fields) - known:
        where = f"{path}.{min(unknown)}" if path else min(unknown)
        raise _Wrong(f"{where}: there is no such key; there are {', '.join(sorted(known))}")


def _tables(value: Any, path: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(fields, dict) for fields in value.values()):
        raise _Wrong(f"{path}: must be written [{path}.NAME]")
    return value


def _strings(fields: dict[str, Any], key: str, path: str) -> list[str]:
    value = fields.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _Wrong(f"{path}.{key}: must be a list of texts")
    return value


def _count(fields: dict[str, Any], key: str, path: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Wrong(f"{path}.{key}: must be a whole number of at least 0")
    return value
