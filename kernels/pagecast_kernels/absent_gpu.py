"""A GPU that need not be there: what triton and the launch tables ask of one, answered for a GPU that is only named."""

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pagecast_kernels import configs


class _AbsentGpu:
    """What triton asks of a driver in order to compile."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(arch: int, processors: int) -> None:
    """From here on this process compiles kernels, and chooses launches, for a GPU of compute capability `arch` (90 for 9.0) with so many
    streaming multiprocessors. None of them can be started."""
    driver.set_active(_AbsentGpu(arch))
    configs.processors = lambda device: processors  # type: ignore[assignment]
    configs.arch = lambda device: arch  # type: ignore[assignment]
