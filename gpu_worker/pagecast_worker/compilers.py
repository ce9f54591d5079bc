"""What a worker on a GPU begins before it imports torch: the driver, and a process that gets ready to compile kernels, so that they begin
as soon as the model's shape is known. What that one does is in `precompile`; this module loads no torch."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

DRIVER = Path("/dev/nvidiactl")
FEWEST_PROCESSORS = 4
MARK = "pagecast-"
"""How the files begin, in triton's cache, that say for what all kernels are there."""


class Compilers:
    """One process, and those that it makes of itself. It ends with this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "pagecast_worker.precompile", str(os.getpid())]
        none = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=none, stderr=none)

    def begin(self, request: str) -> None:
        """request: one line, see precompile.launch_all. Once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which `end` tells

    def end(self, seconds: float) -> bool:
        """Wait as long as that; whether all went well. Nothing is left of it afterwards."""
        try:
            return self._process.wait(max(0.1, seconds)) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """There is nothing to compile."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        self._process.kill()
        self._process.wait()


def start_early(device: str) -> Compilers | None:
    """For a worker on this device. Compilers, if there is likely to be something to compile: no kernels are in the cache yet."""
    if device.partition(":")[0] not in ("auto", "cuda") or not DRIVER.exists():
        return None
    threading.Thread(target=_wake_driver, name="driver", daemon=True).start()
    if (os.cpu_count() or 1) < FEWEST_PROCESSORS:
        return None
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return None if any(cache.glob(f"{MARK}*")) else Compilers()


def _wake_driver() -> None:
    """Initialize CUDA, as torch will do once more, for which it then does not wait."""
    try:
        ctypes.CDLL("libcuda.so.1").cuInit(0)
    except (OSError, AttributeError):
        pass  # torch will say what is wrong
