"""`pagecast serve [MODEL]`: every role of one host, supervised, until SIGINT or SIGTERM."""

import argparse
import sys
from contextlib import nullcontext

from pagecast import cluster, models
from pagecast.cli import options
from pagecast.cli.loading import LoadingBar
from pagecast_scheduler.launch.events import ChildExited, Event, Failed, Loading, Ready, Stopping
from pagecast_scheduler.launch.local import LaunchError, RunDir, Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL",
                        help=f"folder in Hugging Face layout, .gguf file, or a packaged model's name (default: {models.DEFAULT_MODEL})")
    parser.add_argument("--run-dir", metavar="FOLDER", help="folder (mode 0700) for the cluster's sockets (default: a fresh temporary one)")
    options.add(parser, options.of(options.SERVE))


def run(args: argparse.Namespace) -> int:
    chosen = cluster.settings(args.model, **options.values(args, options.SERVE))
    cluster.check(chosen)
    if chosen["log_format"] == "auto" and sys.stderr.isatty():
        chosen["log_format"] = "console"  # the roles write into a pipe and cannot see the terminal
    keeper = nullcontext()
    if chosen["num_frontends"] > 1 and chosen["port"] == 0:
        chosen["port"], keeper = cluster.shared_port(chosen["host"])  # type: ignore[assignment]
    try:
        with keeper, RunDir.take(args.run_dir) as run_dir:
            screen = Screen(str(chosen["served_model_name"]))
            supervisor = Supervisor(cluster.role_specs(chosen, str(run_dir.path)), run_dir, screen.on_event, screen.bar.print)
            try:
                return supervisor.run_forever()
            finally:
                screen.bar.close()
    except LaunchError as error:
        print(f"pagecast serve: {error}", file=sys.stderr)
        return error.exit_code


class Screen:
    """What the operator sees of the cluster. Called from the supervising thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.bar = LoadingBar()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Loading):
            self.bar.update(event.rank, event.phase, event.done, event.total)
        elif isinstance(event, Ready):
            self.bar.close()
            self._say(f"serving {self._model} on {', '.join(sorted(set(event.addresses)))}")
        elif isinstance(event, ChildExited) and event.restart_in_s is not None:
            self._say(f"{event.name} ended with {event.code}; starting it again in {event.restart_in_s:.1f} s")
        elif isinstance(event, Stopping):
            self._say(f"stopping {', '.join(event.names)}")
        elif isinstance(event, Failed):
            self.bar.close()
            line = event.line.removeprefix(f"pagecast {event.name.split('-')[0]}: ")
            print(f"pagecast serve: {event.name} failed: {line or 'it said nothing'}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(text, flush=True)
