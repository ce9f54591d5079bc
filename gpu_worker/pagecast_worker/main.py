"""Life of one worker process: load, hello, loop, end. Exit codes: 0 told to stop, 1 a fault, 2 a start that cannot work."""

import os
import signal
import sys
from types import FrameType
from typing import Final

import structlog
import zmq

from pagecast_wire import log_lines
from pagecast_wire.codec import WireError
from pagecast_wire.keys import KeysError
from pagecast_wire.lifeline import die_with_parent
from pagecast_wire.result import WorkerFault
from pagecast_worker.compilers import start_early
from pagecast_worker.config import WorkerConfig
from pagecast_worker.executor import Executor, LoadError, OutOfMemory, PlanError, Stopped
from pagecast_worker.link import Link
from pagecast_worker.loop import Loop
from pagecast_worker.oracle import OracleExecutor
from pagecast_worker.progress import ProgressReport

EXIT_OK: Final = 0
EXIT_FAULT: Final = 1
EXIT_CONFIG: Final = 2
_MAX_IPC_PATH: Final = 107  # sockaddr_un.sun_path less its final zero (linux/un.h)
_log = structlog.get_logger(__name__)


def run(config: WorkerConfig) -> int:
    """Run one rank until it is told to stop or fails; returns the exit code."""
    die_with_parent()
    log_lines.configure(config.log_format, config.log_level, process="worker", rank=config.rank)
    path = config.workers_endpoint.removeprefix("ipc://")
    if config.head is None and len(path.encode()) > _MAX_IPC_PATH:
        return _refuse(f"run_dir is too long: its socket path has {len(path.encode())} bytes, the limit is {_MAX_IPC_PATH}")
    if config.head is None and not os.path.isdir(config.run_dir):
        return _refuse(f"the run directory {config.run_dir} does not exist: give the --run-dir of a scheduler that has been started")
    try:
        link = Link(config)
    except KeysError as error:
        return _refuse(str(error))
    try:
        link.connect()
        code = _serve(config, link)
    except LoadError as error:
        code = _refuse(str(error))
    except zmq.ZMQError as error:
        code = _refuse(f"cannot connect to {config.workers_endpoint}: {error.strerror}")
    finally:
        link.close()
    if config.tensor_parallel_size > 1:
        # A collective that another rank never joins cannot be ended in order.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def make_executor(config: WorkerConfig, link: Link) -> Executor:
    """The executor that the configuration names. torch is imported only if it is that one. Raises LoadError."""
    if config.executor == "oracle":
        return OracleExecutor(config)
    compilers = start_early(config.device)
    try:
        from pagecast_worker.torch_executor import TorchExecutor
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pagecast"):
            raise
        raise LoadError(f"the torch executor needs the package {error.name}; install pagecast[worker]") from error
    executor: Executor = TorchExecutor(config, link, compilers)
    return executor


def _serve(config: WorkerConfig, link: Link) -> int:
    with _Interruption(link) as interruption:
        try:
            executor = make_executor(config, link)
            facts, num_blocks = executor.load(ProgressReport(link, config.run_dir, config.rank))
            loop = Loop(link, executor, config.rank)
            interruption.hand_over(loop)
        except Stopped:
            return EXIT_OK
        except (LoadError, OutOfMemory) as error:
            _report(link, config.rank, (0, 0), "load", error)
            return _refuse(" ".join(str(error).split()))
        except Exception as error:
            _log.exception("loading failed")
            _report(link, config.rank, (0, 0), "load", error)
            print(f"pagecast worker: loading failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
            return EXIT_FAULT
        _log.info("loaded", model=facts.name, num_blocks=num_blocks, dtype=facts.dtype)
        try:
            link.introduce(facts, num_blocks, executor.step_sizes)
            loop.run()
        except Exception as error:
            _log.exception("a step failed", epoch=loop.current[0], step=loop.current[1])
            _report(link, config.rank, loop.current, _fault_kind(error), error)
            return EXIT_FAULT
        finally:
            executor.close()
        return _refuse(loop.refusal) if loop.refusal else EXIT_OK


def _fault_kind(error: Exception) -> str:
    if isinstance(error, OutOfMemory):
        return "out_of_memory"
    return "protocol" if isinstance(error, PlanError | WireError) else "step"


def _report(link: Link, rank: int, current: tuple[int, int], kind: str, error: Exception) -> None:
    epoch, step = current
    link.send(WorkerFault(rank=rank, epoch=epoch, step=step, kind=kind, detail=f"{type(error).__name__}: {error}"[:2000]))


def _refuse(line: str) -> int:
    """One line for the operator, and the exit code of a start that no restart can repair."""
    print(f"pagecast worker: {line}", file=sys.stderr, flush=True)
    return EXIT_CONFIG


class _Interruption:
    """SIGTERM and SIGINT: end the process at once while it loads, when nobody has anything of it, and libraries take no exception in their
    midst; later, let the loop end after the step at hand."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop: Loop | None = None

    def hand_over(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> "_Interruption":
        signal.set_wakeup_fd(self._link.wake_write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._loop is None:
            os._exit(EXIT_OK)
        self._loop.stop()
