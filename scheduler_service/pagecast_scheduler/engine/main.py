"""Entry point of the scheduler role: from a configuration to an exit code.

0: stopped in order. 1: ended with an error. 2: cannot start as configured. 5: must be started again. Whatever is not 0 is explained
by one plain line on standard error.
"""

import os
import signal
import sys
from types import FrameType

import zmq

from pagecast_scheduler.engine.config import ConfigError, EngineConfig
from pagecast_scheduler.engine.epochs import Record
from pagecast_scheduler.engine.loop import Engine
from pagecast_scheduler.engine.run_state import RunDirInUse, RunDirLock
from pagecast_wire import log_lines
from pagecast_wire.keys import KeysError

EXIT_CONFIG = 2


def run(config: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT (once: drain; twice: at once), or until nothing can be served any more."""
    log_lines.configure(config.log_format, config.log_level, process="scheduler")
    try:
        os.makedirs(config.run_dir, mode=0o700, exist_ok=True)
        lock = RunDirLock(config.run_dir)
    except RunDirInUse as error:
        return _say(EXIT_CONFIG, str(error))
    except OSError as error:
        return _say(EXIT_CONFIG, f"run_dir {config.run_dir} cannot be used: {error.strerror}")
    try:
        recorder = _recorder(config)
    except OSError as error:
        lock.release()
        return _say(EXIT_CONFIG, f"record {config.record} cannot be written: {error.strerror}")
    try:
        engine = Engine(config, recorder)
    except (KeysError, ConfigError) as error:
        lock.release()
        return _say(EXIT_CONFIG, str(error))
    except (OSError, zmq.ZMQError) as error:
        lock.release()
        return _say(EXIT_CONFIG, f"cannot start in {config.run_dir}: {error}")
    try:
        return _serve(engine)
    finally:
        lock.release()


def _serve(engine: Engine) -> int:
    def on_signal(number: int, frame: FrameType | None) -> None:
        engine.stop()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = engine.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return _say(code, engine.reason) if code else code


def _say(code: int, line: str) -> int:
    print(f"pagecast scheduler: {line}", file=sys.stderr, flush=True)
    return code


def _recorder(config: EngineConfig) -> Record | None:
    """The recorder that the configuration asks for. Raises OSError if its file cannot be written."""
    if config.record is None:
        return None
    from pagecast_scheduler.engine.recorder import Recorder

    record: Record = Recorder(config.record, config.record_tokens)
    return record
