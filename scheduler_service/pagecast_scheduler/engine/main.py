"""Entry point of the scheduler role: from a configuration to an exit code.

0: stopped in order. 1: ended with an error that is logged. 2: cannot start as configured. 5: must be started again.
"""

import os
import signal
from types import FrameType

import zmq

from pagecast_scheduler.engine import logs
from pagecast_scheduler.engine.config import EngineConfig
from pagecast_scheduler.engine.epochs import Record
from pagecast_scheduler.engine.loop import Engine
from pagecast_scheduler.engine.run_state import RunDirInUse, RunDirLock

EXIT_CONFIG = 2


def run(config: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT (once: drain; twice: at once), or until nothing can be served any more."""
    logs.configure(config.log_format, config.log_level)
    log = logs.logger("main")
    try:
        os.makedirs(config.run_dir, mode=0o700, exist_ok=True)
        lock = RunDirLock(config.run_dir)
    except RunDirInUse as error:
        log.error(str(error))
        return EXIT_CONFIG
    except OSError as error:
        log.error("run directory cannot be used", run_dir=config.run_dir, error=error.strerror)
        return EXIT_CONFIG
    try:
        engine = Engine(config, _recorder(config))
    except (OSError, zmq.ZMQError) as error:
        log.error("scheduler cannot start", run_dir=config.run_dir, error=str(error))
        lock.release()
        return EXIT_CONFIG

    def on_signal(number: int, frame: FrameType | None) -> None:
        engine.stop()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return engine.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        lock.release()


def _recorder(config: EngineConfig) -> Record | None:
    """The recorder that the configuration asks for. Raises OSError if its file cannot be written."""
    if config.record is None:
        return None
    from pagecast_scheduler.engine.recorder import Recorder

    record: Record = Recorder(config.record, config.record_tokens)
    return record
