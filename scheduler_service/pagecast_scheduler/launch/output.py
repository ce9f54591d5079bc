"""What children write, line by line, from a thread of its own: a terminal that stalls must not stall supervision."""

import atexit
import os
import select
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

OnOutput = Callable[[str, str], None]
"""Called with a child's name and one line without its end, from the output thread."""

_MAX_LINE: Final = 65536


_MAX_WAITING: Final = 10_000
"""Lines that wait for a slow reader of standard error; more are dropped, and counted."""
_LAST_WORDS_S: Final = 1.0


class Console:
    """Lines on their way to a file descriptor, from a thread of its own: neither a reader that stalls nor one that has gone holds up
    whoever has something to say. Each line is one write, so that no other text ends up within it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: deque[str] = deque()
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def write_line(self, line: str) -> None:
        """Returns at once."""
        with self._changed:
            if len(self._waiting) < _MAX_WAITING:
                self._waiting.append(line)
                self._changed.notify_all()
            else:
                self._num_dropped += 1

    def flush(self, timeout: float) -> bool:
        """Wait until all is written, at most `timeout` seconds. Whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                line, dropped = self._waiting[0], self._num_dropped
                self._num_dropped = 0
            if dropped:
                self._write(f"{dropped} lines were dropped because nobody read them")
            self._write(line)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode(errors="replace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select([], [self._fd], [])
            except OSError:
                return  # there is nobody to tell


_console: Console | None = None
_making = threading.Lock()


def write_line(line: str) -> None:
    """A line to standard error, without waiting for its reader; the last ones are waited for at the end of the process."""
    global _console
    with _making:
        if _console is None:
            sys.stderr.flush()
            _console = Console(2)
            atexit.register(_console.flush, _LAST_WORDS_S)
    _console.write_line(line)


def to_stderr(name: str, line: str) -> None:
    """Pass a line on as it is; every log line says already which role wrote it."""
    write_line(line)


class Stream:
    """The output of one life of a child. last_line is its last non-empty line; `closed` is set once all of it was read."""

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.fd = name, fd
        self.last_line = ""
        self.closed = threading.Event()
        self._partial = b""

    def lines(self, data: bytes) -> list[str]:
        """Complete lines that `data` brings (no data: the end, so the rest)."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > _MAX_LINE:
            lines, self._partial = [*lines, self._partial], b""
        texts = [text for line in lines if (text := line.decode(errors="replace").rstrip())]
        self.last_line = texts[-1] if texts else self.last_line
        return texts


class OutputPump:
    """Reads every child's pipe and hands lines to `on_output`."""

    def __init__(self, on_output: OnOutput) -> None:
        self._on_output = on_output
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._added: list[Stream] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="child-output", daemon=True)
        self._thread.start()

    def open(self, name: str) -> tuple[Stream, int]:
        """A new stream and the writing end for the child, which the caller closes after the spawn."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        stream = Stream(name, reader)
        self._added.append(stream)
        os.write(self._wake_writer, b"+")
        return stream, writer

    def close(self) -> None:
        """Read what is left of children that have ended, then end the thread. A grandchild that still holds a pipe is not waited for."""
        self._closing = True
        os.write(self._wake_writer, b"+")
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            ready = self._selector.select(0.2 if self._closing else None)
            for key, _ in ready:
                if key.fd == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                else:
                    self._read(key.data)
            while self._added:
                stream = self._added.pop(0)
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
            if self._closing and not ready:
                break
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        os.close(self._wake_writer)

    def _read(self, stream: Stream) -> None:
        data = os.read(stream.fd, 65536)
        for line in stream.lines(data):
            self._on_output(stream.name, line)
        if not data:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            stream.closed.set()
