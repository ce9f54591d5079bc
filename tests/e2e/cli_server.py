"""`pagecast serve` as a process, for tests: started, waited for, asked about its processes, and ended."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

import psutil

PAGECAST = [sys.executable, "-m", "pagecast.cli.main"]
LIMIT_S = 120


@dataclass
class Served:
    """A running `pagecast serve`. lines: what it has written to standard error. http: URL of its gateway, if it has one."""

    process: subprocess.Popen[str]
    address: str
    lines: list[str] = field(default_factory=list)
    http: str = ""

    def children(self) -> dict[str, list[psutil.Process]]:
        """Its processes by role, oldest first; without those that have ended, or are not yet what they are to be."""
        found: dict[str, list[psutil.Process]] = {"frontend": [], "scheduler": [], "worker": []}
        for child in sorted(psutil.Process(self.process.pid).children(), key=lambda process: process.create_time()):
            with suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if "pagecast.cli.main" in words:
                    found.setdefault(words[words.index("pagecast.cli.main") + 1], []).append(child)
        return found

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit code, with a limit that no orderly end comes near."""
        self.process.send_signal(number)
        return self.process.wait(timeout=LIMIT_S)


def pagecast(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PAGECAST, *words], capture_output=True, text=True, input=stdin, timeout=LIMIT_S)


@contextmanager
def serve(*words: str, terminal: bool = False) -> Iterator[Served]:
    """Serve on a free port with a short drain, and end it afterwards if the test has not. terminal: standard error is one."""
    command = [*PAGECAST, "serve", "--port", "0", "--drain-announce-s", "0", "--drain-timeout-s", "2", *words]
    reading, writing = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True)
    os.close(writing)
    assert process.stdout
    served = Served(process, "")
    errors = os.fdopen(reading, errors="replace")
    reader = threading.Thread(target=_read, args=(errors, served.lines), daemon=True)
    reader.start()
    try:
        first = process.stdout.readline()  # ends with the process, if it never serves
        assert first.startswith("serving "), "".join(served.lines)
        addresses = first.split(" on ")[-1].strip().split(", ")
        served.address = addresses[0]
        served.http = addresses[-1] if addresses[-1].startswith("http") else ""
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=LIMIT_S)
        reader.join(timeout=LIMIT_S)
        process.stdout.close()
        errors.close()


def _read(errors: TextIO, lines: list[str]) -> None:
    with suppress(OSError):  # a terminal ends so
        lines.extend(errors)
