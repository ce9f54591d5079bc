"""What a test may leave behind: nothing. Finds processes that outlive their tests, and with them every socket and port they hold.

Every process that a test starts, directly or not, inherits a variable of the test process's own; that finds also those whose parents
have gone, and that hid behind a session of their own.
"""

import os
import secrets
import time
from pathlib import Path

import psutil

VARIABLE = "PAGECAST_TEST_PROCESS"
PATIENCE_S = 25.0
"""Five times what the rest of a cluster may take after a death."""
LASTING = ("resource_tracker", "forkserver", "compile_worker", "execnet")
"""Parts of other libraries' processes' command lines that live as long as the test process."""

os.environ[VARIABLE] = f"{os.getpid()}-{secrets.token_hex(8)}"


def processes() -> list[str]:
    """Command lines of living processes that this one's tests have started."""
    mark = f"{VARIABLE}={os.environ[VARIABLE]}".encode()
    found = {child.pid: child for child in psutil.Process().children(recursive=True)}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.setdefault(int(folder.name), psutil.Process(int(folder.name)))
        except (OSError, psutil.NoSuchProcess):
            continue
    return sorted(filter(None, map(_line, found.values())))


def _line(process: psutil.Process) -> str:
    """Empty for one that has ended meanwhile, or is to last."""
    try:
        line = " ".join(process.cmdline())
        if process.status() == psutil.STATUS_ZOMBIE or any(word in line for word in LASTING):
            return ""
        return f"process {process.pid}: {line[:300]}"
    except psutil.NoSuchProcess:
        return ""


def wait_for_none(patience_s: float = PATIENCE_S) -> list[str]:
    """What is there once all has had its time to go."""
    until = time.monotonic() + patience_s
    while (now := processes()) and time.monotonic() < until:
        time.sleep(0.1)
    return now
