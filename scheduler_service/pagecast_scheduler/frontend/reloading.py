"""Files that are read again when they change. What was good last stays in use while what is there now is not."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger("pagecast.frontend")

T = TypeVar("T")
CHECK_EVERY_S = 0.5
"""Files are looked at no more often than this."""

_Signature = tuple[tuple[int, int, int], ...]


class Reloading(Generic[T]):
    """A value made from files. Safe to use from several threads."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """name: what the log calls it. read: makes the value; its exception's text is one line for the operator. Raises what it raises."""
        self._name, self._paths, self._read = name, tuple(paths), read
        self._lock = threading.Lock()
        self.num_failures = 0
        self._fault: tuple[_Signature, str] | None = None
        self._seen = self._signature()
        self._value = read()
        self._next_check = time.monotonic() + CHECK_EVERY_S

    @property
    def value(self) -> T:
        """The last good value, read again first if the files have changed."""
        now = time.monotonic()
        with self._lock:
            if now >= self._next_check:
                self._next_check = now + CHECK_EVERY_S
                self._reload()
            return self._value

    def _reload(self) -> None:
        seen: _Signature = ()
        try:
            seen = self._signature()
            if seen == self._seen:
                return
            self._seen = seen
            value = self._read()
            if self._signature() != seen:
                self._seen = ()  # changed while it was read: look again next time
                return
        except Exception as error:
            self._note_fault(seen, str(error))
            self._seen = ()  # what was in the way may go without another change of the files: look again next time
            return
        self._value, self._fault = value, None
        log.info(f"{self._name} reloaded")

    def _note_fault(self, seen: _Signature, detail: str) -> None:
        """Each fault of each state of the files is told once."""
        if (seen, detail) != self._fault:
            self._fault = seen, detail
            self.num_failures += 1
            log.error(f"{self._name} not taken over, the last good one stays in use", detail=detail)

    def _signature(self) -> _Signature:
        """What changes with the files; a folder of links (as secrets are mounted) counts with what it points to."""
        found = []
        for path in self._paths:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)
