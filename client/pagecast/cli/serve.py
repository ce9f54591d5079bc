"""`pagecast serve [MODEL]`: every role of one host, supervised, until SIGINT or SIGTERM."""

import argparse
import sys
from contextlib import ExitStack

from pagecast import cluster, models
from pagecast.cli import options
from pagecast.cli.loading import LoadingBar
from pagecast_scheduler.launch.events import ChildExited, ChildHung, Event, Failed, Loading, Ready, Stopping
from pagecast_scheduler.launch.local import LaunchError, RunDir, Supervisor
from pagecast_scheduler.launch.output import write_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL",
                        help="folder in Hugging Face layout, .gguf file, ORG/MODEL at a hub, or a packaged model's name "
                        f"(default: {models.DEFAULT_MODEL})")
    parser.add_argument("--run-dir", metavar="FOLDER", help="folder (mode 0700) for the cluster's sockets (default: a fresh temporary one)")
    options.add(parser, options.of(options.SERVE))


def run(args: argparse.Namespace) -> int:
    chosen = cluster.settings(args.model, **options.values(args, options.SERVE))
    cluster.check(chosen)
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
            screen = Screen(str(chosen["served_model_name"]), chosen["head"])
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

    head: where the scheduler is, seen from a host that has nothing but ranks.
    """

    def __init__(self, model: str, head: str | None) -> None:
        self._model, self._head = model, head
        self._last_words: dict[str, str] = {}
        self.bar = LoadingBar()

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
            self._complain(f"{event.name} hangs: no sign of life for {event.silent_s:.0f} s; it is killed")
        elif isinstance(event, ChildExited) and event.restart_in_s is not None:
            why = self._last_words.pop(event.name, f"exit code {event.code}")
            self._complain(f"{event.name} ended: {why}; it starts again in {event.restart_in_s:.1f} s")
        elif isinstance(event, Failed):
            self.bar.close()
            self._complain(f"{event.name} failed: {self._last_words.pop(event.name, event.line or 'it said nothing')}")

    def _complain(self, text: str) -> None:
        write_line(f"pagecast serve: {text}")


def _say(text: str) -> None:
    """In one piece, also where the output is not buffered and another thread writes beside it."""
    print(f"{text}\n", end="", flush=True)
