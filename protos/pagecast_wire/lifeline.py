"""How a child process makes sure that it does not outlive the process that started it.

Two independent means: the kernel's parent-death signal, and a pipe whose writing end only the parent holds. The signal also
ends a child that is stuck in native code; the pipe also works when the signal was lost to a race or a changed credential. A
process that nobody supervises (a container's first process, a shell's command) finds no variable and is left alone.
"""

import ctypes
import os
import signal
import threading
from typing import Final

VARIABLE: Final = "PAGECAST_LIFELINE"
"""Environment variable "PARENT_PID:FD" that a supervisor sets for its children; FD is the reading end of its pipe."""

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ORPHANED: Final = 3
"""Exit code of a child that noticed by itself that its parent is gone."""


def die_with_parent() -> bool:
    """Tie this process to its supervisor; returns whether it has one. Call it once, first thing, from the main thread.

    The signal is sent when the *thread* that spawned this process ends, so a supervisor spawns from a thread that lives as long
    as it does. The variable is removed, so that processes started from here are not tied to a parent that is not theirs.
    """
    value = os.environ.pop(VARIABLE, "")
    if not value:
        return False
    parent, fd = (int(part) for part in value.split(":"))
    die_with(parent)
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()
    return True


def die_with(parent: int) -> None:
    """Tie this process to its parent, by its id, through the signal alone: for one that is stuck in nothing and holds nothing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(_ORPHANED)


def _watch(fd: int) -> None:
    while os.read(fd, 64):
        pass
    os._exit(_ORPHANED)
