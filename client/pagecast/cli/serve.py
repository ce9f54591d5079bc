"""`pagecast serve [MODEL]`: every role of one host, supervised, until SIGINT or SIGTERM."""

import argparse
import json
import sys
from contextlib import ExitStack
from datetime import UTC, datetime

from pagecast import cluster, models
from pagecast.cli import options
from pagecast.cli.loading import LoadingBar
from pagecast_scheduler.launch.events import ChildExited, ChildHung, Event, Failed, Loading, Ready, Stopping
from pagecast_scheduler.launch.output import write_line
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir
from pagecast_scheduler.launch.supervisor import Supervisor


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
    if chosen["log_format"] == "auto" and sys.stderr.isatty():
        chosen["log_format"] = "console"  # the roles write into a pipe and cannot see the terminal
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
            screen = Screen(str(chosen["served_model_name"]), chosen["head"], as_json=chosen["log_format"] != "console")
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

    head: where the scheduler is, seen from a host that has nothing but ranks. as_json: what is said among log lines is one of them, as
    the roles' are; why the cluster cannot go on is said in words all the same.
    """

    def __init__(self, model: str, head: str | None, *, as_json: bool = False) -> None:
        self._model, self._head, self._as_json = model, head, as_json
        self._last_words: dict[str, str] = {}
        self.bar = LoadingBar(self._loading)

    def on_output(self, name: str, line: str) -> None:
        """A log line is passed on; what a command says on its way out is kept for the line about its end."""
        prefix = f"pagecast {name.split('-')[0]}: "
        if line.startswith(prefix):
            self._last_words[name] = line.removeprefix(prefix)
        else:
            self.bar.print(name, line)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Loading):
            self.bar.update(event.rank, event.phase, event.done, event.total)
        elif isinstance(event, Ready):
            self.bar.close()
            where = f"on {', '.join(sorted(set(event.addresses)))}" if event.addresses else f"with the scheduler at {self._head}"
            _say(f"serving {self._model} {where}")
        elif isinstance(event, Stopping):
            _say(f"stopping {', '.join(event.names)}")
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
            write_line(f"pagecast serve: {event.name} failed: {said}")

    def warn(self, text: str) -> None:
        """Something to know before the cluster serves."""
        self._write(f"pagecast serve: {text}", text, "warning")

    def _loading(self, rank: int, phase: str) -> None:
        self._write(f"rank {rank}: {phase}", "loading", "info", rank=rank, phase=phase)

    def _complain(self, text: str, event: str, **facts: str | float) -> None:
        self._write(f"pagecast serve: {text}", event, "error", **facts)

    def _write(self, text: str, event: str, level: str, **facts: str | float) -> None:
        """For people or as a log line."""
        if self._as_json:
            now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            text = json.dumps({"process": "supervisor", **facts, "event": event, "level": level, "timestamp": now})
        write_line(text)


def _say(text: str) -> None:
    """In one piece, also where the output is not buffered and another thread writes beside it."""
    print(f"{text}\n", end="", flush=True)
