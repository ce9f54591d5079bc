"""The few numbers that must outlive the scheduler process, in one small file of the run directory, and the lock on that directory.

Nothing here is needed to keep streams correct (front ends bring their requests back themselves); it lets a restarted scheduler
number epochs and slots above the old ones, and know whom to wait for.
"""

import fcntl
import os

import msgspec

LOCK_FILE = "scheduler.lock"
STATE_FILE = "scheduler.state"


class RunDirInUse(RuntimeError):
    """Another scheduler serves this run directory. The text is one line for the operator."""


class KnownFrontend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A front end that was connected when the state was written."""

    slot: int
    incarnation: str
    pid: int
    pid_namespace: int


class RunState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """epoch: highest epoch ever opened (0: none). next_slot: lowest front-end slot never given away."""

    epoch: int = 0
    next_slot: int = 1
    frontends: tuple[KnownFrontend, ...] = ()


def load(run_dir: str) -> RunState:
    """The state a previous scheduler left; a fresh one if there is none, or it cannot be read."""
    try:
        with open(f"{run_dir}/{STATE_FILE}", "rb") as file:
            return msgspec.json.decode(file.read(), type=RunState)
    except (OSError, msgspec.MsgspecError):
        return RunState()


def save(run_dir: str, state: RunState) -> None:
    """Replace the state file in one step. Raises OSError (a full disk); the caller goes on without."""
    temporary = f"{run_dir}/{STATE_FILE}.new"
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(state))
    os.replace(temporary, f"{run_dir}/{STATE_FILE}")


class RunDirLock:
    """Held for the life of the process; the kernel lets go of it whatever way the process ends."""

    def __init__(self, run_dir: str) -> None:
        """Raises RunDirInUse, or OSError where the directory cannot be written."""
        path = f"{run_dir}/{LOCK_FILE}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise RunDirInUse(f"another scheduler (process {holder}) already serves {run_dir}") from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let another scheduler in."""
        os.close(self._fd)
