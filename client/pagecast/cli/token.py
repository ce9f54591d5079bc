"""`pagecast token PRINCIPAL`: a new bearer token. Shows it once; the file of principals gets its hash alone."""

import argparse
import hashlib
import os
import re
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pagecast.cli.quantities import Number

_NAME = re.compile(r"[\w.@/:-]{1,128}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("principal", metavar="PRINCIPAL", help="whose token it is")
    parser.add_argument("--file", metavar="FILE", help="file of principals to add it to, made with mode 0600 if it is not there")
    parser.add_argument("--days", type=Number(above=0, most=36_500, unit="days"), metavar="N", help="days until it ends (default: never)")
    parser.add_argument("--role", action="append", choices=("infer", "observe", "admin"), dest="roles",
                        help="role of the principal, if the file does not know it yet; may be given several times (default: infer)")


def run(args: argparse.Namespace) -> int:
    if not _NAME.fullmatch(args.principal):
        print("pagecast token: a principal's name has 1 to 128 letters, digits and any of . _ @ / : -", file=sys.stderr)
        return 2
    token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    entry = _entry(args.principal, token_id, secret, args.days)
    try:
        if args.file is None:
            print(f"# Add this to the file of principals (--auth-file):\n{entry}", file=sys.stderr)
        else:
            _append(Path(args.file), args.principal, args.roles, entry)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        print(f"pagecast token: cannot add to {args.file}: {reason}", file=sys.stderr)
        return 2
    print(f"pagecast.{token_id}.{secret}")
    return 0


def _entry(principal: str, token_id: str, secret: str, days: float | None) -> str:
    lines = ["[[token]]", f'principal = "{principal}"', f'id = "{token_id}"', f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"']
    if days is not None:
        end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
        lines.append(f"expires = {end.isoformat().replace('+00:00', 'Z')}")
    return "\n".join(lines) + "\n"


def _append(path: Path, principal: str, roles: list[str] | None, entry: str) -> None:
    """Puts a new file in place, so that a server that reads meanwhile sees the old one or the new one whole.

    Raises OSError, or ValueError for a file that is no TOML, and for roles of a principal that it knows: they stand there.
    """
    import tomllib

    path = path.resolve()
    before = path.read_text() if path.exists() else ""
    known = tomllib.loads(before).get("principal", {})
    if principal in known and roles:
        raise ValueError(f"principal {principal} is there already: change its roles in the file, and leave --role out")
    text = before + ("\n" if before and not before.endswith("\n") else "")
    if principal not in known:
        listed = ", ".join(f'"{role}"' for role in dict.fromkeys(roles or ["infer"]))
        text += f'\n[principal."{principal}"]\nroles = [{listed}]\n'
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{text}\n{entry}")
            os.fchmod(file.fileno(), mode)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
