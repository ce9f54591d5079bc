"""`pagecast admin`: drain a replica, see why requests wait, end them, forget the prefix cache, restart its workers, check its laws."""

import argparse
from collections.abc import Callable
from pathlib import Path

from pagecast.admin import LOG_LEVELS, Admin, OpenRequest
from pagecast.cli import arguments
from pagecast.cli.parser import Parser
from pagecast.errors import PagecastError, RpcError

ACTIONS = {
    "drain": "no new requests; running ones go on",
    "undrain": "take requests again",
    "requests": "open requests, and why each waits",
    "cancel": "end requests by id, or all with --all",
    "reset-cache": "forget every cached block",
    "restart-workers": "new worker processes; running requests wait for them and go on",
    "check": "check the scheduler's laws now; exit code 1 if one does not hold",
    "log-level": "how much every process logs: debug, info, warning, error, or default for what each was started with",
}
TIMEOUT_S = 30.0
DEFAULT_LEVEL = "default"


class NoOperators(PagecastError):
    """A listener that serves clients alone."""

    exit_code = 2


def add_arguments(parser: Parser) -> None:
    arguments.add_target(parser, timeout=TIMEOUT_S)
    parser.add_argument("--run-dir", metavar="FOLDER", help="operate the cluster of this run directory, through its operators' socket")
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help="one of those below")
    parser.add_argument("words", metavar="WORD", nargs="*", help="request ids for cancel, a level for log-level")
    parser.add_argument("--all", action="store_true", help="for cancel: every open request")
    parser.set_lines("actions", ACTIONS)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Raises RpcError where the server refuses."""
    if args.words and args.action not in ("cancel", "log-level"):
        args.usage_error(f"{args.action} takes no {args.words[0]!r}")
    if args.action == "log-level" and (len(args.words) != 1 or args.words[0] not in (*LOG_LEVELS[1:], DEFAULT_LEVEL)):
        args.usage_error(f"log-level takes one of {', '.join((*LOG_LEVELS[1:], DEFAULT_LEVEL))}")
    if args.all and (args.action != "cancel" or args.words):
        args.usage_error("--all is for cancel, without request ids")
    if args.action == "cancel" and not args.words and not args.all:
        args.usage_error("cancel takes request ids, or --all")
    if args.run_dir is not None:
        if not Path(args.run_dir, "admin-0.sock").exists():
            raise NoOperators(f"{args.run_dir} has no operators' socket: no cluster runs there")
        args.target = f"unix:{args.run_dir}/admin-0.sock"
    try:
        with arguments.connect(args) as client:
            return _ACTS[args.action](client.admin, args)
    except RpcError as error:
        if error.code != "UNIMPLEMENTED":
            raise
        raise NoOperators(f"{args.target} has no methods for operators; give --run-dir, or the operators' port as --target") from None


def _drain(admin: Admin, args: argparse.Namespace) -> int:
    print(f"draining, {admin.drain(timeout=args.timeout)} requests open")
    return 0


def _undrain(admin: Admin, args: argparse.Namespace) -> int:
    print(f"serving, {admin.undrain(timeout=args.timeout)} requests open")
    return 0


def _requests(admin: Admin, args: argparse.Namespace) -> int:
    total = 0
    for info in admin.requests(timeout=args.timeout):
        print(line_of(info))
        total += 1
    print(f"{total} open")
    return 0


def line_of(info: OpenRequest) -> str:
    """One request as `pagecast admin requests` shows it."""
    why = "" if info.waiting is None else f": {info.waiting.explanation}"
    prefilled = min(info.computed_tokens, info.prompt_tokens)  # what is computed goes on into the output
    done = f"{prefilled}/{info.prompt_tokens} prompt, {info.output_tokens} output"
    labels = "".join(f"  {key}={value}" for key, value in sorted(info.labels.items()))
    return f"{info.request_id}  {info.phase}  {info.age:.1f} s  {done}{labels}{why}"


def _cancel(admin: Admin, args: argparse.Namespace) -> int:
    told = admin.cancel(args.words, all=args.all, timeout=args.timeout)
    print(f"{len(told.cancelled)} ended, {len(told.finished)} had ended, {len(told.unknown)} unknown")
    return 1 if told.unknown else 0


def _reset_cache(admin: Admin, args: argparse.Namespace) -> int:
    print(f"{admin.reset_prefix_cache(timeout=args.timeout)} blocks forgotten")
    return 0


def _restart_workers(admin: Admin, args: argparse.Namespace) -> int:
    told = admin.restart_workers(timeout=args.timeout)
    if not told.num_ranks:
        print("no workers are up; new ones are on their way")
        return 1
    print(f"{told.num_ranks} workers ended, {told.num_requests} requests go on in new ones")
    return 0


def _check(admin: Admin, args: argparse.Namespace) -> int:
    told = admin.check_invariants(timeout=args.timeout)
    print("all laws hold" if told.ok else f"broken: {told.violation}")
    print(f"{told.num_blocks} blocks: {told.num_clean} clean, {told.num_cached} cached, {told.num_referenced} in use")
    return 0 if told.ok else 1


def _log_level(admin: Admin, args: argparse.Namespace) -> int:
    level = args.words[0]
    before = admin.set_log_level("" if level == DEFAULT_LEVEL else level, timeout=args.timeout)
    print(f"{level}, {before or DEFAULT_LEVEL} before")
    return 0


_ACTS: dict[str, Callable[[Admin, argparse.Namespace], int]] = {
    "drain": _drain, "undrain": _undrain, "requests": _requests, "cancel": _cancel, "reset-cache": _reset_cache,
    "restart-workers": _restart_workers, "check": _check, "log-level": _log_level,
}  # fmt: skip
