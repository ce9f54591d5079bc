"""CurveZMQ keys of the link between scheduler and ranks, as `pagecast keys` writes them: one file for each side, in one folder.

The scheduler takes ranks whose public key it knows; a rank talks to the scheduler whose public key it was given. Keys are Z85 text, as
ZeroMQ takes them. Reads and writes files; opens no socket.
"""

import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

SCHEDULER_FILE = "scheduler.key"
RANK_FILE = "rank.key"
_LENGTH = 40  # of a 32-byte key in Z85


class KeysError(ValueError):
    """A file of keys that cannot be used. The text is one line that names the file; it holds no key."""


class SchedulerKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler holds: its own pair, and the public keys of ranks that may dial in."""

    public: str
    secret: str
    ranks: tuple[str, ...]


class RankKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """What every rank holds: the ranks' pair, and the scheduler's public key."""

    public: str
    secret: str
    scheduler: str


K = TypeVar("K", SchedulerKeys, RankKeys)


def read_scheduler_keys(folder: str) -> SchedulerKeys:
    """Raises KeysError."""
    keys = _read(Path(folder) / SCHEDULER_FILE, SchedulerKeys)
    _check((keys.public, keys.secret, *keys.ranks), folder, SCHEDULER_FILE)
    return keys


def read_rank_keys(folder: str) -> RankKeys:
    """Raises KeysError."""
    keys = _read(Path(folder) / RANK_FILE, RankKeys)
    _check((keys.public, keys.secret, keys.scheduler), folder, RANK_FILE)
    return keys


def write_keys(folder: Path, scheduler: SchedulerKeys, rank: RankKeys) -> None:
    """Makes the folder (mode 0700) and both files (0600). Raises FileExistsError rather than replace a key; OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (SCHEDULER_FILE, RANK_FILE):
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} is there already")
    for name, keys in ((SCHEDULER_FILE, scheduler), (RANK_FILE, rank)):
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(keys), indent=1) + b"\n")
        except OSError:
            for made in (SCHEDULER_FILE, RANK_FILE):  # the half of a pair would be of no use, and in the way of the next try
                (folder / made).unlink(missing_ok=True)
            raise


def _read(path: Path, kind: type[K]) -> K:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise KeysError(f"wire_keys: {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise KeysError(f"wire_keys: {path} is no file of keys made by `pagecast keys`") from None


def _check(texts: tuple[str, ...], folder: str, name: str) -> None:
    if any(len(text) != _LENGTH or not text.isascii() for text in texts):
        raise KeysError(f"wire_keys: {Path(folder) / name} holds a key that is not {_LENGTH} characters long")
