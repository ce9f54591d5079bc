"""The front end process: configuration in, exit code out.

Start: bind (a taken port is told at once), load the tokenizer, dial the scheduler, serve, publish the address. End, on SIGTERM or
SIGINT: say NOT_SERVING, go on accepting while balancers notice, refuse new calls, wait for open ones, end the rest with a status,
end Watches, exit 0. A second signal ends at once.
"""

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import grpc
import structlog

from pagecast_scheduler.frontend.auth_file import AuthFileError
from pagecast_scheduler.frontend.authorizer import Authorizer, watch_auth_file
from pagecast_scheduler.frontend.certificates import CertificateError
from pagecast_scheduler.frontend.certificates import watch as watch_certificates
from pagecast_scheduler.frontend.config import FrontendConfig, check
from pagecast_scheduler.frontend.engine_client import EngineClient
from pagecast_scheduler.frontend.errors import Reason
from pagecast_scheduler.frontend.event_loop import run_until_done
from pagecast_scheduler.frontend.health import HealthServicer
from pagecast_scheduler.frontend.listeners import (
    Guards,
    Listener,
    PortInUse,
    all_addresses,
    listen_for_operators,
    listen_for_probes,
    listen_publicly,
)
from pagecast_scheduler.frontend.load_reports import Trailer
from pagecast_scheduler.frontend.metrics import FrontendMetrics
from pagecast_scheduler.frontend.namespace import load_key
from pagecast_scheduler.frontend.prompts import PromptMaker
from pagecast_scheduler.frontend.server import SERVICES, Services
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_scheduler.frontend.tokenizer import Tokenizer, load_tokenizer
from pagecast_scheduler.frontend.tracing import spans_to
from pagecast_wire import log_lines
from pagecast_wire.intake import ServingState
from pagecast_wire.pulse import Pulse

log = structlog.get_logger("pagecast.frontend")

CLOSING_S = 1.0
"""How long ended calls get to send their status."""
HOUSEKEEPING_S = 1.0
"""How often files are looked at, and the loop's lateness is measured, while nobody calls."""

YOUNG_OBJECTS = 50_000
"""Objects made before the collector looks for cycles among the young: a call makes hundreds that die by themselves, and several hundred
calls may be open."""

TELL_AFTER = 3
"""Rounds without a word of the scheduler after which the log says once what is waited for."""


class StartError(Exception):
    """Why the process cannot start, as one line for the operator."""


def _load(model: str) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartError(f"cannot load the tokenizer of {model}: {reason}") from error


class Frontend:
    """One front end's parts, from `start` to `stop`."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._has_served = False
        self._rounds_unheard = 0
        self._log_level = config.log_level
        self.address = ""

    async def start(self) -> None:
        """Serves from here on. Raises StartError or PortInUse."""
        config = self._config
        try:
            key = load_key(self._run_dir)
        except OSError as error:
            raise StartError(f"cannot use the run directory {config.run_dir}: {error.strerror}") from None
        self._guards = self._make_guards()
        self._listen()
        tokenizer = await asyncio.get_running_loop().run_in_executor(None, _load, config.model)
        self._engine = EngineClient(f"ipc://{config.run_dir}/frontends.ipc", config.slow_consumer_timeout_s)
        self._prompts = PromptMaker(tokenizer)
        self.state = ServiceState(config, self._engine, self._prompts, key)
        self._trailer = Trailer(self.state)
        self._health = HealthServicer(SERVICES)
        self._pulse = Pulse(f"{config.run_dir}/frontend-{config.index}.pulse")
        self._add_services()
        self._engine.on_change = self._on_change
        for listener in self._listeners:
            await listener.server.start()
        self._engine.start()
        self._publish("address", self.address)
        log.info("listening", addresses=all_addresses(self._listeners), index=config.index, tls=self._guards.certificates is not None)
        self._keep_house(asyncio.get_running_loop().time())

    def _make_guards(self) -> Guards:
        """What stands before every service. Raises StartError."""
        config = self._config
        try:
            certificates = watch_certificates(config)
            authorizer = Authorizer(watch_auth_file(config.auth_file), config.tls_client_ca is not None)
            port = config.frontend_metrics_port
            metrics = FrontendMetrics(None if port is None else port + config.index)
            spans = spans_to(config.otlp_endpoint)
        except (CertificateError, AuthFileError) as error:
            raise StartError(str(error)) from None
        except OSError as error:
            raise StartError(f"cannot serve metrics on port {config.frontend_metrics_port}: {error.strerror}") from None
        except ModuleNotFoundError as error:
            raise StartError(f"otlp_endpoint needs the package {error.name}; install it with: pip install 'pagecast[otel]'") from None
        return Guards(authorizer, certificates, metrics, spans, lambda: self._trailer())

    def _listen(self) -> None:
        """Binds every listener. Raises PortInUse."""
        config, guards = self._config, self._guards
        self._public = listen_publicly(config, guards)
        self._operators = listen_for_operators(config, guards)
        self._probes = listen_for_probes(config, guards)
        self._listeners: list[Listener] = [self._public, *self._operators, *([self._probes] if self._probes is not None else [])]
        self.address = self._public.address

    def _add_services(self) -> None:
        services = Services(self.state, self._health)
        services.add_public(self._public)
        for listener in self._operators:
            services.add_operator(listener)
        if self._probes is not None:
            services.add_probe(self._probes)

    def _keep_house(self, due: float) -> None:
        """Once a second: changed files are taken over also while nobody calls, and the metrics that nobody's call moves are set."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        guards = self._guards
        self._pulse.beat()
        self._rounds_unheard += not self._engine.link.has_dialled
        if self._rounds_unheard == TELL_AFTER and not self._engine.link.has_dialled:
            log.warning("waiting for the scheduler", run_dir=str(self._run_dir))
        guards.metrics.loop_lag(now - due)
        if guards.certificates is not None:
            guards.metrics.certificate_expires(guards.certificates.value.expires.timestamp())
            guards.metrics.reload_failures("certificates", guards.certificates.num_failures)
        guards.metrics.reload_failures("auth_file", guards.authorizer.refresh())
        self._timer = loop.call_at(now + HOUSEKEEPING_S, self._keep_house, now + HOUSEKEEPING_S)

    def _on_change(self) -> None:
        """The engine's state may have changed: health follows, and the first SERVING is published."""
        state = self.state.serving_state
        self._health.update(state)
        if state is ServingState.SERVING and not self._has_served:
            self._has_served = True
            self._publish("serving", self.address)
            log.info("serving", address=self.address, model=self.state.model_name)
        self._follow_log_level()
        if self._engine.refused is not None:
            self.end()

    def _follow_log_level(self) -> None:
        """An operator may have set one for the whole cluster."""
        status = self._engine.status
        wanted = (status.log_level if status is not None else "") or self._config.log_level
        if wanted != self._log_level:
            self._log_level = wanted
            log_lines.set_level(wanted)

    def _publish(self, kind: str, text: str) -> None:
        """Writes RUN_DIR/frontend-<index>.<kind>, whole from the moment it can be seen."""
        path = self._run_dir / f"frontend-{self._config.index}.{kind}"
        fresh = path.with_suffix(f".{kind}.new")
        fresh.write_text(text + "\n")
        os.replace(fresh, path)

    def end(self) -> None:
        """What a signal means: drain the first time, stop at once the second."""
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    async def run_until_stopped(self) -> str | None:
        """Serves until a signal or a refusal by the scheduler, then drains. Returns the refusal's text, or None."""
        await self._stopping.wait()
        refused = self._engine.refused
        if refused is None:
            await self._drain()
        await self._stop()
        return refused

    async def _drain(self) -> None:
        state = self.state
        state.is_announcing_end = True
        self._health.update(state.serving_state)
        log.info("draining", open_calls=len(self._engine.calls))
        await self._pause(self._config.drain_announce_s if self._has_served else 0.0)
        state.is_draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.drain_timeout_s
        while self._engine.calls and loop.time() < until and not self._at_once.is_set():
            await self._pause(0.05)
        self._engine.fail_all(Reason.DRAIN_TIMEOUT)

    async def _pause(self, seconds: float) -> None:
        """Waits, unless told to stop at once."""
        try:
            await asyncio.wait_for(self._at_once.wait(), seconds)
        except TimeoutError:
            pass

    async def _stop(self) -> None:
        self._health.end_watches()
        self.state.ending.set()
        await asyncio.gather(*(listener.server.stop(CLOSING_S) for listener in self._listeners))
        self._timer.cancel()
        self._pulse.end()
        self._engine.close()
        self._prompts.close()
        self._guards.metrics.close()
        await asyncio.get_running_loop().run_in_executor(None, self._guards.spans.close)
        await self.state.constraints.close()
        log.info("stopped")


async def serve(config: FrontendConfig) -> int:
    """Runs one front end to its end. Returns the exit code."""
    frontend = Frontend(config)
    loop = asyncio.get_running_loop()
    try:
        await frontend.start()
    except (StartError, PortInUse) as error:
        print(f"pagecast frontend: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, frontend.end)
    gc.collect()
    gc.freeze()  # what was loaded stays: looking through it would hold up every call
    gc.set_threshold(YOUNG_OBJECTS)
    refused = await frontend.run_until_stopped()
    if refused is not None:
        print(f"pagecast frontend: the scheduler refuses this front end: {refused}", file=sys.stderr)
        return 2
    return 0


def run(config: FrontendConfig) -> int:
    """Entry point of the role. Returns the exit code."""
    problem = check(config)
    if problem is not None:
        print(f"pagecast frontend: {problem}", file=sys.stderr)
        return 2
    log_lines.configure(config.log_format, config.log_level, process="frontend", index=config.index)
    if Path(config.model).is_dir():
        # transformers reads such a folder without torch, but would load it (seconds, hundreds of MiB) if it found it.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    grpc.aio.init_grpc_aio()
    return run_until_done(serve(config))
