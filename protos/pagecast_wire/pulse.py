"""A process's sign of life to whoever supervises it: a file that says when its loop last came round.

Death is seen at once, through the kernel; this is for a process that is there and does nothing any more. The number is nanoseconds of
CLOCK_MONOTONIC, which all processes of a host share.
"""

import os
import struct
import time

_NUMBER = struct.Struct("<q")


class Pulse:
    """The file, from its making on. Never fails: where nothing can be written it is empty, and an empty file blames nobody."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            self._fd = -1

    def beat(self) -> None:
        """The loop comes round."""
        if self._fd < 0:
            return
        try:
            os.pwrite(self._fd, _NUMBER.pack(time.monotonic_ns()), 0)
        except OSError:
            try:
                os.ftruncate(self._fd, 0)
            except OSError:
                self.end()

    def end(self) -> None:
        """The loop ends in order: what comes after is nobody's to judge."""
        if self._fd >= 0:
            try:
                os.ftruncate(self._fd, 0)
            except OSError:
                pass
            os.close(self._fd)
            self._fd = -1


def last_beat(path: str) -> float | None:
    """Monotonic seconds of the last beat; None if there is nothing to go by."""
    try:
        with open(path, "rb") as file:
            data = file.read(_NUMBER.size)
    except OSError:
        return None
    return _NUMBER.unpack(data)[0] / 1e9 if len(data) == _NUMBER.size else None
