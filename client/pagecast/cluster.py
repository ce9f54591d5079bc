"""From the options of `serve` to running processes: command lines of every role, and a cluster of one's own for one program."""

import errno
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pagecast import models
from pagecast.cli import options, roles
from pagecast.cli.parser import meant
from pagecast.errors import StartError
from pagecast_scheduler.launch.events import Event
from pagecast_scheduler.launch.launcher import Launcher, Local, Static
from pagecast_scheduler.launch.output import OnOutput
from pagecast_scheduler.launch.process import RoleSpec
from pagecast_scheduler.launch.run_dir import LaunchError, RunDir
from pagecast_scheduler.launch.supervisor import Supervisor, ignore

START_TIMEOUT_S = 900.0
"""How long a cluster may take to load a model; longer than a rank is given by the scheduler."""

MAX_FRONTENDS = 256

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"), int: ((Integral,), "a whole number"), float: ((Real,), "a number"), str: ((str, PathLike), "a text"),
}
"""Of an option's values in Python: what they may be instances of, and in words."""

_EXIT_MARGIN_S = 5.0
"""What a front end or a gateway needs to close after its drain."""


def settings(model: str = models.DEFAULT_MODEL, **given: Any) -> dict[str, Any]:
    """All options of `serve` with `given` over the defaults, and under "model" what the worker is to load.

    Raises TypeError for a name that is no option and a value of another kind, ModelNotFound or ModelUnreadable for the model.
    """
    known = {option.name: option.default for option in options.of(options.SERVE)}
    if unknown := sorted(given.keys() - known.keys()):
        raise TypeError(f"no option {unknown[0]!r}{meant(unknown[0], known) or '; there are ' + ', '.join(sorted(known))}")
    for option in options.of(options.SERVE):
        _check_kind(option, given.get(option.name))
    chosen = known | given
    if chosen["executor"] == "oracle":
        chosen["model"], name = "oracle", "oracle"
    elif chosen["random_weights"] is not None:
        models.check_shape(chosen["random_weights"])
        chosen["model"] = name = Path(chosen["random_weights"]).name
    else:
        models.fetch(model)
        chosen["model"], name = str(models.resolve(model)), models.display_name(model)
    if chosen["served_model_name"] is None:
        chosen["served_model_name"] = name
    if chosen["tokenizer"] is not None:
        chosen["tokenizer"] = str(models.tokenizer(chosen["tokenizer"]))
    return chosen


def _check_kind(option: options.Option, value: Any) -> None:
    wanted, words = _KINDS[option.kind]
    if value is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and option.kind is not bool)):
        raise TypeError(f"{option.name} must be {words}, not {value!r}")


def check(chosen: Mapping[str, Any]) -> str | None:
    """Raises StartError for the first value that a role would refuse, before anything is started. Returns one line of what will be less
    than asked for, or None."""
    try:
        configs = {role: roles.configuration(role, _role_values(role, chosen, "/run")) for role in (*options.ROLES, options.GATEWAY)}
        note = roles.check_model(configs[options.WORKER], here=chosen["launcher"] != "ray")
    except ValueError as error:
        raise StartError(str(error), 2) from None
    if not 1 <= chosen["num_frontends"] <= MAX_FRONTENDS:
        raise StartError(f"num_frontends must be 1 to {MAX_FRONTENDS}, not {chosen['num_frontends']}", 2)
    if chosen["record_tokens"] and chosen["record"] is None:
        raise StartError("--record-tokens needs --record", 2)
    _check_hosts(chosen)
    return note


def _check_hosts(chosen: Mapping[str, Any]) -> None:
    """Raises StartError for options about several hosts that say nothing, or only half, of where they are."""
    spreads = chosen["launcher"] == "static"
    if not spreads and chosen["nnodes"] != 1:
        raise StartError(f"--nnodes {chosen['nnodes']} needs --launcher static; the launcher is {chosen['launcher']}", 2)
    if not spreads and chosen["node_rank"] != 0:
        raise StartError(f"--node-rank {chosen['node_rank']} needs --launcher static and --nnodes", 2)
    if spreads and chosen["nnodes"] == 1:
        words = "needs --nnodes of at least 2 and --head, and --node-rank on each host; one host needs no launcher"
        raise StartError(f"--launcher static {words}", 2)
    if chosen["head"] is None and (chosen["wire_keys"] is not None or chosen["insecure_wire"]) and chosen["launcher"] == "local":
        raise StartError(f"{'--wire-keys' if chosen['wire_keys'] is not None else '--insecure-wire'} needs --head", 2)


def launcher(chosen: Mapping[str, Any]) -> Launcher:
    """The launcher that these options ask for. Raises LaunchError."""
    if chosen["launcher"] == "ray":
        from pagecast_scheduler.launch.ray import OverRay

        return OverRay(chosen["tensor_parallel_size"], chosen["device"], chosen["head"])
    if chosen["launcher"] == "static":
        return Static(chosen["nnodes"], chosen["node_rank"], chosen["head"])
    return Local()


def role_specs(chosen: Mapping[str, Any], run_dir: str) -> list[RoleSpec]:
    """What to run: the scheduler, a worker for each rank, and the front ends."""
    specs = [RoleSpec("scheduler", _argv(options.SCHEDULER, _role_values(options.SCHEDULER, chosen, run_dir)))]
    for rank in range(chosen["tensor_parallel_size"]):
        specs.append(RoleSpec("worker", _argv(options.WORKER, _role_values(options.WORKER, chosen, run_dir) | {"rank": rank}), rank))
    grace = chosen["drain_announce_s"] + chosen["drain_timeout_s"] + _EXIT_MARGIN_S
    for index in range(chosen["num_frontends"]):
        shares = chosen["num_frontends"] > 1 or chosen.get("keeps_port", False)  # with each other, or with the socket that keeps it
        values = _role_values(options.FRONTEND, chosen, run_dir) | {"index": index, "reuse_port": shares}
        if index > 0:  # a Unix socket has one listener
            values["uds"] = f"{values['uds']}.{index}" if chosen.get("own_sockets", False) else None
        values["gateway_socket"] = chosen["http_port"] is not None
        specs.append(RoleSpec("frontend", _argv(options.FRONTEND, values), index, grace_s=grace))
    if chosen["http_port"] is not None:
        specs.append(_gateway(chosen, run_dir))
    return specs


def _gateway(chosen: Mapping[str, Any], run_dir: str) -> RoleSpec:
    """One HTTP gateway, which reaches the front ends through their sockets in the run directory."""
    sockets = ",".join(f"unix:{run_dir}/frontend-{index}.sock" for index in range(chosen["num_frontends"]))
    values = _role_values(options.GATEWAY, chosen, run_dir) | {"target": sockets, "publish": f"{run_dir}/gateway-0.address"}
    values["reuse_port"] = chosen.get("keeps_http_port", False)
    values["drain_announce_s"] = 0.0  # it is told when its front ends have ended, who announced that to its callers too
    return RoleSpec("gateway", _argv(options.GATEWAY, values), grace_s=chosen["drain_timeout_s"] + _EXIT_MARGIN_S)


def check_port(host: str, port: int) -> None:
    """Raises StartError if nothing can listen there. A front end would say so too, but only after others have started."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise StartError(f"cannot listen on {host}:{port}: {why}", 2) from None


def hold_port(host: str, port: int) -> socket.socket:
    """Keeps an address that several processes of one cluster share from those of another, which the system would let share it too.
    Held while the socket is open, gone with this process however it ends. Raises StartError if another cluster has it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0pagecast-listen-{host}:{port}")  # a name without a file, of this network namespace, as ports are
    except OSError as error:
        holder.close()
        why = "another cluster has it" if error.errno == errno.EADDRINUSE else error.strerror
        raise StartError(f"cannot listen on {host}:{port}: {why}", 2) from None
    return holder


def shared_port(host: str) -> tuple[int, socket.socket]:
    """A free port that several processes can listen on together, and the socket that keeps it for them while it is open."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = socket.socket(family, socket.SOCK_STREAM)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind((host.strip("[]"), 0))
    return int(keeper.getsockname()[1]), keeper


def _role_values(role: str, chosen: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    values = {option.name: chosen.get(option.name, option.default) for option in options.of(role)}
    if role != options.GATEWAY:
        values["run_dir"] = run_dir
    made_up = chosen["executor"] == "oracle" or chosen["random_weights"] is not None
    if role == options.FRONTEND and chosen["tokenizer"] is not None:
        values["model"] = chosen["tokenizer"]
    elif role == options.FRONTEND and made_up:
        values["model"] = ""  # no tokenizer either: the front end then maps bytes to ids
    return values


def _argv(role: str, values: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "pagecast.cli.main", role, *options.words(role, values)]


def drop(name: str, line: str) -> None:
    """An on_output that keeps a cluster's log off the standard error of the program that embeds it."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told of what happens in a private cluster."""

    on_event: Callable[[Event], None] = ignore
    on_output: OnOutput = drop


class PrivateCluster:
    """A cluster for this program alone, reached through Unix sockets in a folder of mode 0700, one for each front end; it ends when the
    program does.

    Blocks until the cluster serves. Raises StartError, with the last thing the failing process said.
    """

    def __init__(self, chosen: Mapping[str, Any], watch: Watch = Watch()) -> None:
        if chosen["launcher"] != "local":
            raise StartError(f"a program's own cluster is on its own host: launcher must be local, not {chosen['launcher']}", 2)
        try:
            run_dir = RunDir.take()
        except LaunchError as error:
            raise StartError(str(error), error.exit_code) from None
        # Nobody balances over a private cluster: its end need not be announced, and its calls end with it.
        private = dict(chosen) | {"port": 0, "uds": str(run_dir.path / "client.sock"), "drain_announce_s": 0.0, "drain_timeout_s": 0.5}
        private["own_sockets"] = True
        self.target = f"unix:{private['uds']}"
        self.targets = (self.target, *(f"{self.target}.{index}" for index in range(1, private["num_frontends"])))
        self.max_message_bytes: int = private["max_message_bytes"]
        self._supervisor = Supervisor(role_specs(private, str(run_dir.path)), run_dir, watch.on_event, watch.on_output)
        try:
            check(private)
            self._supervisor.start()
            self.addresses = self._supervisor.wait_ready(START_TIMEOUT_S)
        except LaunchError as error:
            self.close()
            raise StartError(str(error), error.exit_code) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process. Returns when they are gone."""
        self._supervisor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
