"""`pagecast scheduler`, `worker`, `frontend` and `gateway`: one process of a cluster each. Only the chosen role's code is imported."""

import argparse
import sys
from importlib import import_module
from typing import Any

from pagecast import models
from pagecast.cli import options

_CODE = {
    options.SCHEDULER: ("pagecast_scheduler.engine", "EngineConfig"),
    options.WORKER: ("pagecast_worker", "WorkerConfig"),
    options.FRONTEND: ("pagecast_scheduler.frontend", "FrontendConfig"),
    options.GATEWAY: ("pagecast_scheduler.gateway", "GatewayConfig"),
}
"""Role to the package with its `config` and `main` modules, and the name of its configuration class."""


def add_arguments(parser: argparse.ArgumentParser, role: str) -> None:
    options.add(parser, options.of(role))


def configuration(role: str, given: dict[str, Any]) -> Any:
    """The role's configuration object. Raises ValueError where a value is out of its range."""
    package, name = _CODE[role]
    module = import_module(f"{package}.config")
    config = getattr(module, name)(**given)
    if role in (options.FRONTEND, options.GATEWAY) and (wrong := module.check(config)):
        raise ValueError(wrong)
    return config


def check_model(config: Any, *, here: bool = True) -> str | None:
    """What a worker's options say together with its model's configuration: one line of what will be less than asked for, or None.

    here: it runs on this machine. Raises ValueError for what cannot work."""
    note: str | None = import_module("pagecast_worker.outset").check(config, here=here)
    return note


def run(args: argparse.Namespace, role: str) -> int:
    # Before anything that takes time: a role that a supervisor started must not outlive it.
    import_module("pagecast_wire.lifeline").die_with_parent()
    given = options.values(args, role)
    if "model" in given:
        given["model"] = _model_for(role, given)
    try:
        config = configuration(role, given)
        if role == options.WORKER and not options.is_supervised():
            check_model(config)
    except ValueError as error:
        print(f"pagecast {role}: {options.flagged(str(error))}", file=sys.stderr)
        return 2
    return int(import_module(f"{_CODE[role][0]}.main").run(config))


def _model_for(role: str, given: dict[str, Any]) -> str:
    """An absolute path, except where no model is read: by the oracle, with made-up weights, and by a front end told so with ""."""
    name = str(given["model"])
    if not name or given.get("executor") == "oracle" or given.get("random_weights"):
        return name
    found = models.tokenizer(name) if role == options.FRONTEND else models.resolve(name)
    return str(found)
