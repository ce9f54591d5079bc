"""`pagecast serve [MODEL]`: every role of one host, supervised, until SIGINT or SIGTERM."""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from pagecast import cluster, models
from pagecast.cli import options
from pagecast.cli.loading import LoadingBar
from pagecast_scheduler.launch.events import ChildExited, ChildHung, Event, Failed, Loading, Ready, Stopping
from pagecast_scheduler.launch.output import write_line
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir
from pagecast_scheduler.launch.supervisor import Supervisor
from pagecast_wire.log_lines import COLOURED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL",
                        help="folder in Hugging Face layout, .gguf file, ORG/MODEL at a hub, or a packaged model's name "
                        f"(default: {models.DEFAULT_MODEL})")
    parser.add_argument("--run-dir", metavar="FOLDER", help="folder (mode 0700) for the cluster's sockets (default: a fresh temporary one)")
    options.add(parser, options.of(options.SERVE))


def run(args: argparse.Namespace) -> int:
    chosen = cluster.settings(args.model, **options.values(args, options.SERVE))
    note = cluster.check(chosen)
    if chosen["node_rank"] == 0:
        cluster.check_port(chosen["host"], chosen["port"])
    if sys.stderr.isatty():  # the roles write into a pipe and cannot see the terminal
        os.environ.setdefault(COLOURED, "1")
        if chosen["log_format"] == "auto":
            chosen["log_format"] = "console"
    try:
        with ExitStack() as keepers, RunDir.take(args.run_dir) as run_dir:
            for name, keeps in (("port", "keeps_port"), ("http_port", "keeps_http_port")):
                if chosen[name] == 0:  # decided here, so that a process that starts again is found where it was
                    chosen[name], keeper = cluster.shared_port(chosen["host"])
                    chosen[keeps] = True
                    keepers.enter_context(keeper)
            if chosen["num_frontends"] > 1 and chosen["node_rank"] == 0:
                keepers.enter_context(cluster.hold_port(chosen["host"], chosen["port"]))
            launcher = cluster.launcher(chosen)
            keepers.enter_context(launcher.held())
            specs = launcher.placed(cluster.role_specs(chosen, str(run_dir.path)))
            screen = Screen(str(chosen["served_model_name"]), chosen["head"], str(chosen["log_format"]))
            if note is not None:
                screen.warn(options.flagged(note))
            supervisor = Supervisor(specs, run_dir, screen.on_event, screen.on_output)
            try:
                return supervisor.run_forever()
            finally:
                screen.bar.close()
    except LaunchError as error:
        print(f"pagecast serve: {options.flagged(str(error))}", file=sys.stderr)
        return error.exit_code


class Screen:
    """What the operator sees of the cluster. on_event is called from the supervising thread, on_output from another.

    Standard error has the log, standard output where the cluster serves and that it ends. head: where the scheduler is, seen from a host
    that has nothing but ranks. log_format: "console": words; "json": every line of either stream is JSON; "auto": only what is said among
    the roles' log lines, which are JSON then. Standard output, and why the cluster cannot go on, are for whoever started it: in words.
    """

    def __init__(self, model: str, head: str | None, log_format: str) -> None:
        self._model, self._head = model, head
        self._as_json, self._all_json = log_format != "console", log_format == "json"
        self._last_words: dict[str, str] = {}
        self.bar = LoadingBar(self._loading)

    def on_output(self, name: str, line: str) -> None:
        """A log line is passed on; what a command says on its way out is kept for the line about its end."""
        prefix = f"pagecast {name.split('-')[0]}: "
        if line.startswith(prefix):
            self._last_words[name] = line.removeprefix(prefix)
        elif self._all_json and not line.startswith("{"):  # a library's, or a traceback's
            self.bar.print(name, _json("output", "warning", process=name.split("-")[0], name=name, line=line))
        else:
            self.bar.print(name, line)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Loading):
            self.bar.update(event.rank, event.phase, event.done, event.total)
        elif isinstance(event, Ready):
            self.bar.close()
            addresses = sorted(set(event.addresses))
            where = f"on {', '.join(addresses)}" if addresses else f"with the scheduler at {self._head}"
            place: dict[str, Any] = {"addresses": addresses} if addresses else {"head": self._head}
            self._say(f"serving {self._model} {where}", "serving", model=self._model, **place)
        elif isinstance(event, Stopping):
            self._say(f"stopping {', '.join(event.names)}", "stopping", names=event.names)
        elif isinstance(event, ChildHung):
            said = f"{event.name} hangs: no sign of life for {event.silent_s:.0f} s; it is killed"
            self._complain(said, "process hangs", name=event.name, silent_s=round(event.silent_s, 1))
        elif isinstance(event, ChildExited) and event.restart_in_s is not None:
            why = self._last_words.pop(event.name, f"exit code {event.code}")
            said = f"{event.name} ended: {why}; it starts again in {event.restart_in_s:.1f} s"
            self._complain(said, "process ended", name=event.name, why=why, restart_in_s=round(event.restart_in_s, 1))
        elif isinstance(event, Failed):
            self.bar.close()
            words = self._last_words.pop(event.name, None)
            said = event.line or "it said nothing" if words is None else options.flagged(words)
            text = f"pagecast serve: {event.name} failed: {said}"
            write_line(_json("failed", "critical", name=event.name, why=said) if self._all_json else text)

    def warn(self, text: str) -> None:
        """Something to know before the cluster serves."""
        self._write(f"pagecast serve: {text}", text, "warning")

    def _loading(self, rank: int, phase: str) -> None:
        self._write(f"rank {rank}: {phase}", "loading", "info", rank=rank, phase=phase)

    def _complain(self, text: str, event: str, **facts: Any) -> None:
        self._write(f"pagecast serve: {text}", event, "error", **facts)

    def _write(self, text: str, event: str, level: str, **facts: Any) -> None:
        """For people or as a log line."""
        write_line(_json(event, level, **facts) if self._as_json else text)

    def _say(self, text: str, event: str, **facts: Any) -> None:
        """On standard output, in one piece: also where that is not buffered and another thread writes beside it."""
        line = _json(event, "info", **facts) if self._all_json else text
        print(f"{line}\n", end="", flush=True)


def _json(event: str, level: str, **facts: Any) -> str:
    """A log line like those of the roles."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"process": "supervisor", **facts, "event": event, "level": level, "timestamp": now})
