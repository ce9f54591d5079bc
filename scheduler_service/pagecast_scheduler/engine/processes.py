"""Watching and killing peer processes through pidfds: death is seen at once, and a reused pid can never be hit."""

import os
import signal

from pagecast_wire.host import pid_namespace as own_pid_namespace


class ProcessGone(Exception):
    """The process had ended before it could be watched."""


class Watched:
    """A peer process. fd is a pidfd (readable once the process has ended), or -1 where the peer lives in another pid namespace."""

    def __init__(self, pid: int, pid_namespace: int) -> None:
        """Raises ProcessGone."""
        self.pid = pid
        self.fd = -1
        if pid_namespace == own_pid_namespace() and pid > 0:
            try:
                self.fd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise ProcessGone(f"process {pid} has ended") from None

    def kill(self) -> bool:
        """SIGKILL. False where the process cannot be reached: another namespace, or already reaped."""
        if self.fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Stop watching. Harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def is_alive(pid: int, pid_namespace: int) -> bool:
    """Whether the process may still be there; a process of another namespace is given the benefit of the doubt."""
    try:
        watched = Watched(pid, pid_namespace)
    except ProcessGone:
        return False
    watched.close()
    return True
