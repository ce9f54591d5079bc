"""`pagecast status`: is the server healthy, what does it serve, how loaded is it. Exit code 0 only if it is SERVING. What the
caller's roles do not open is named; the rest is shown."""

import argparse
import http.client
import json
import re
import socket
import ssl
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pagecast.cli import arguments
from pagecast.cli.quantities import ANY_COUNT
from pagecast.errors import PagecastError, RpcError, WrongAccess
from pagecast.sync import Client
from pagecast.types import Load, Model

T = TypeVar("T")
_HEAD = re.compile(r".+:\d{1,5}")
_URL = re.compile(r"https?://[^/?#]+/?")


class HealthAlone(PagecastError):
    """A listener for health checks."""

    exit_code = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser, timeout=5.0)
    parser.add_argument("--check", action="store_true", help="health alone, for health checks and scripts")
    parser.add_argument("--run-dir", metavar="FOLDER", help="ask instead whether a scheduler listens in this run directory")
    parser.add_argument("--rank", metavar="N", type=ANY_COUNT, help="with --run-dir, ask whether the worker of this rank has loaded")
    parser.add_argument("--head", metavar="HOST:PORT", help="ask instead whether a scheduler listens there for ranks of other hosts")
    parser.add_argument("--url", metavar="URL", help="ask instead whether the HTTP gateway at http://HOST:PORT serves; --ca for HTTPS")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.rank is not None and args.run_dir is None:
        print("pagecast status: --rank needs --run-dir", file=sys.stderr)
        return 2
    if args.head is not None and not _HEAD.fullmatch(args.head):
        print(f"pagecast status: --head must be HOST:PORT, not {args.head!r}", file=sys.stderr)
        return 2
    if args.url is not None and not _URL.fullmatch(args.url):
        print(f"pagecast status: --url must be http://HOST:PORT or https://HOST:PORT, not {args.url!r}", file=sys.stderr)
        return 2
    if args.run_dir is not None or args.head is not None or args.url is not None:
        is_up, said = _of_one_process(args)
        print(said)
        return 0 if is_up else 1
    with arguments.connect(args) as client:
        health = client.health(timeout=args.timeout)
        code = 0 if health == "SERVING" else 1
        if args.check:
            print(health)
            return code
        denied: dict[str, str] = {}
        load = _if_allowed("load", denied, lambda: _load(args.target, client, health, args.timeout))
        models: tuple[Model, ...] | None = ()
        if load is None or load.state != "starting":  # a front end that has never seen a scheduler knows no model yet
            models = _if_allowed("models", denied, lambda: client.models(timeout=args.timeout))
    if args.json:
        shown = None if models is None else [asdict(model) for model in models]
        print(json.dumps({"health": health, "load": load and asdict(load), "models": shown, "denied": denied}))
        return code
    of_engine = "" if load is None else f", engine {load.state}, instance {load.instance_id}, epoch {load.epoch}, step {load.step}"
    print(f"health   {health}{of_engine}")
    for model in models or ():
        print("\n".join(_model_lines(model)))
    if load is not None:
        print("\n".join(_load_lines(load)))
    for what, why in denied.items():
        print(f"{what:8} not for this caller: {why}")
    return code


def _load(target: str, client: Client, health: str, timeout: float) -> Load:
    """Raises HealthAlone where there is no such question."""
    try:
        return client.load(timeout=timeout)
    except RpcError as error:
        if error.code != "UNIMPLEMENTED":
            raise
        raise HealthAlone(f"{target} is {health} and answers nothing but health; --check asks for no more") from None


def _if_allowed(what: str, denied: dict[str, str], ask: Callable[[], T]) -> T | None:
    """The answer; None, and the server's reason in `denied`, where the caller's roles do not open that."""
    try:
        return ask()
    except RpcError as error:
        if error.code != "PERMISSION_DENIED":
            raise
        denied[what] = error.message
        return None


def _of_one_process(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether it is up, and that in words: but for a gateway it says nothing about the health of the whole."""
    if args.url is not None:
        is_up = _gateway_serves(args.url, args.timeout, args.ca)
        return is_up, "SERVING" if is_up else "NOT_SERVING"
    if args.run_dir is not None and args.rank is not None:
        is_up = _has_loaded(args.run_dir, args.rank)
        return is_up, f"rank {args.rank} has {'' if is_up else 'not '}loaded"
    is_up = _head_listens(args.head, args.timeout) if args.run_dir is None else _scheduler_listens(args.run_dir, args.timeout)
    return is_up, "a scheduler listens" if is_up else "no scheduler listens"


def _has_loaded(run_dir: str, rank: int) -> bool:
    """What the worker says of its start in its file."""
    try:
        progress = json.loads(Path(run_dir, f"worker-{rank}.progress").read_bytes())
        return bool(progress["phase"] == "warm-up" and progress["done"] >= progress["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _scheduler_listens(run_dir: str, timeout: float) -> bool:
    """Whether a process accepts connections on the socket that front ends dial; a socket file alone may be a leftover."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(f"{run_dir}/frontends.ipc")
        except OSError:
            return False
    return True


def _head_listens(head: str, timeout: float) -> bool:
    host, _, port = head.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _gateway_serves(url: str, timeout: float, ca: str | None) -> bool:
    """Whether a gateway says that a front end behind it serves. Asked directly, whatever proxies the environment names.

    Raises WrongAccess for a ca that is of no use."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise WrongAccess(f"cannot use {ca}: {error.strerror or 'it holds no certificate in PEM'}") from None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout) as reply:
            return bool(json.load(reply)["status"] == "SERVING")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False


def _model_lines(model: Model) -> list[str]:
    limits = model.limits
    quantization = f" {model.quantization}" if model.quantization else ""
    return [
        f"model    {model.name}: {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {model.dtype}{quantization}, "
        f"digest {model.digest[:12]}",
        f"limits   {limits.max_model_len} tokens a request, {limits.max_num_seqs} sequences at once, "
        f"{limits.max_num_batched_tokens} tokens a step, pool of {limits.max_pool_tokens} tokens",
    ]


def _load_lines(load: Load) -> list[str]:
    hit = f"{100 * load.prefix_tokens_hit / load.prefix_tokens_asked:.0f} %" if load.prefix_tokens_asked else "-"
    return [
        f"load     {load.num_running} running, {load.num_waiting} waiting, "
        f"KV {100 * load.kv_utilization:.1f} % of {load.num_blocks} blocks, {load.num_blocks_cached} cached",
        f"so far   {load.prompt_tokens} prompt and {load.output_tokens} output tokens in {load.device_us / 1e6:.1f} s of the device, "
        f"prefix hits {hit}, "
        f"{load.num_preemptions} preemptions, {load.num_recoveries} recoveries",
    ]
