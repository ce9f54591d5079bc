"""The folder in which a cluster's processes find each other: private, locked while in use, gone afterwards.

Owns the folder and the lock in it. Holds sockets (*.ipc), addresses and signs of readiness of front ends (frontend-<i>.address,
frontend-<i>.serving), loading progress (worker-<rank>.progress), signs of life (*.pulse), what number type a CPU was found to be faster
with (*.dtype), the scheduler's small state and the front ends' common key, which means nothing once the prefix cache is gone.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH: Final = 107
"""Bytes of a Unix socket's path (linux/un.h: 108 with the final zero)."""

_PREFIX: Final = "pagecast-"
_LONGEST_SOCKET: Final = "frontends.ipc"
_LOCK: Final = "supervisor.lock"
_OURS: Final = (
    "*.ipc", "*.address", "*.serving", "*.progress", "*.draft", "*.new", "*.pulse", "*.dtype", "scheduler.state", "scheduler.lock",
    "namespace.key",
)  # fmt: skip


class LaunchError(Exception):
    """A cluster cannot start or has ended by itself. The text is one line for the operator."""

    def __init__(self, line: str, exit_code: int = 2) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class RunDir:
    """A run directory that belongs to this process until `close`."""

    def __init__(self, path: Path, lock_fd: int, created: bool) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._created = created

    @classmethod
    def take(cls, path: str | None = None) -> "RunDir":
        """Make (or take over) the folder; None makes a fresh one among the temporary files and sweeps away those of clusters that
        were killed. Raises LaunchError: too long a path, not private, in use, not writable."""
        try:
            if path is None:
                base = _temporary_base()
                for leftover in _abandoned(base):
                    shutil.rmtree(leftover, ignore_errors=True)
                return cls(folder := Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)), _lock(folder), created=True)
            return cls._take_named(Path(path).absolute())
        except OSError as error:
            raise LaunchError(f"run directory {path or 'in ' + tempfile.gettempdir()}: {error.strerror}") from None

    @classmethod
    def _take_named(cls, folder: Path) -> "RunDir":
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            raise LaunchError(f"run directory must be a path in UTF-8, which its sockets' addresses are: {str(folder)!a}") from None
        length = _socket_path_length(folder)
        if length > MAX_SOCKET_PATH:
            raise LaunchError(f"run directory is too long: its socket paths have {length} bytes, the limit is {MAX_SOCKET_PATH}: {folder}")
        created = not folder.exists()
        if created:
            folder.mkdir(mode=0o700)
        status = folder.stat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LaunchError(f"run directory must be a folder of this user with mode 0700: {folder}")
        taken = cls(folder, _lock(folder), created)
        taken._remove_ours()
        return taken

    def close(self) -> None:
        """Remove the folder if it was made here, else what a cluster leaves in it; then let go of the lock."""
        if self._lock_fd < 0:
            return
        if self._created:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self._remove_ours()
            (self.path / _LOCK).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _remove_ours(self) -> None:
        for pattern in _OURS:
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _socket_path_length(folder: Path) -> int:
    return len(os.fsencode(folder / _LONGEST_SOCKET))


def _temporary_base() -> Path:
    """Where temporary files go, unless that is so deep that no socket could have a path there."""
    base = Path(tempfile.gettempdir())
    return base if _socket_path_length(base / (_PREFIX + "x" * 8)) <= MAX_SOCKET_PATH else Path("/tmp")


def _lock(folder: Path) -> int:
    """Lock the folder. The lock file gets its name only once it is held, so that nobody takes a beginner for a leftover."""
    path = folder / _LOCK
    if path.exists():
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise LaunchError(f"run directory is in use by process {holder or 'unknown'}: {folder}") from None
    else:
        draft = folder / f"{_LOCK}.{os.getpid()}"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(draft, path)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _abandoned(base: Path) -> Iterator[Path]:
    """Run directories of this user whose supervisor is gone: the lock file is there and nobody holds it."""
    for lock in base.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.stat().st_uid != os.geteuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock.parent
        except OSError:
            continue
