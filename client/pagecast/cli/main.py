"""`pagecast COMMAND ...`: finds the command, loads its module alone, runs it, and turns what went wrong into one line and an exit code."""

import errno
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

from pagecast.cli.parser import Parser, meant
from pagecast.errors import PagecastError, StartError

COMMANDS = {
    "serve": "start a whole cluster on this host: front end(s), scheduler, worker(s)",
    "frontend": "start one front end: gRPC to clients, no model",
    "gateway": "start an HTTP gateway: OpenAI's API, and a page to chat, over gRPC front ends",
    "scheduler": "start the scheduler: block table and batching, no torch",
    "worker": "start one worker: a rank of the model",
    "generate": "ask a server for one answer and stream it",
    "chat": "talk to a server",
    "batch": "answer a file of OpenAI batch requests, offline",
    "pull": "fetch a model from a Hugging Face hub",
    "models": "what a server's models are, can do and allow",
    "tokenizer-report": "tokens per character of Chinese, English and code, for one or more models",
    "status": "health, model and load of a server",
    "admin": "operate a replica: drain, why requests wait, cancel, restart workers, reset the cache, check, log level",
    "token": "make a bearer token for a principal",
    "demo": "start a cluster, ask three questions at once, show the streams side by side",
    "keys": "make keys for ranks on several hosts",
    "bench": "measure: the scheduler, kernels, the CPU backend beside transformers, ...",
    "quantize": "write a checkpoint whose weights have 4 or 8 bits",
    "perplexity": "how well a model foretells a text, through the engine that serves it",
    "replay": "run a recording of a scheduler again",
    "conformance": "hold any endpoint to the public contract",
    "version": "versions of Pagecast and of what it runs on",
}
"""Every command and what it does. Its code is in the module of that name beside this file; the four roles are in roles.py."""

_ROLES = ("frontend", "gateway", "scheduler", "worker")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of disks that take no more, which any file may meet that a command writes, its output included."""
_QUIET = "GRPC_VERBOSITY"
"""What gRPC logs at a client, the error says as well; at a server its errors stay."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Exit codes: 0 done, 1 failed, 2 cannot work as it was asked, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not of UTF-8 has no letter for much that models say
    if not words or words[0] in ("-h", "--help"):
        return _told("pagecast", partial(_help, 0 if words else 2))
    command, rest = ("version" if words[0] == "--version" else words[0]), words[1:]
    if command not in COMMANDS:
        print(f"pagecast: no command {command!r}{meant(command, COMMANDS)}; see `pagecast --help`", file=sys.stderr)
        return 2
    return _told(f"pagecast {command}", partial(_run, command, rest))


def overview() -> str:
    """The text of `pagecast --help`."""
    lines = ["usage: pagecast COMMAND [options]", "", "Serves large language models over gRPC.", "", "commands:"]
    lines += [f"  {name:<17} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "`pagecast COMMAND --help` lists a command's options."])


def _help(code: int) -> int:
    print(overview())
    sys.stdout.flush()
    return code


def _run(command: str, rest: list[str]) -> int:
    os.environ.setdefault(_QUIET, "ERROR" if command in (*_ROLES, "serve") else "NONE")
    parser = Parser(f"pagecast {command}", COMMANDS[command])
    if command in _ROLES:
        roles = import_module("pagecast.cli.roles")
        roles.add_arguments(parser, command)
        return int(roles.run(parser.parse_args(rest), command))
    module = import_module(f"pagecast.cli.{command.replace('-', '_')}")
    module.add_arguments(parser)
    code = int(module.run(parser.parse_args(rest)))
    sys.stdout.flush()
    return code


def _told(name: str, work: Callable[[], int]) -> int:
    """What work returns; what goes wrong in ways that a user can mend is one line behind the command's name, and an exit code."""
    try:
        return work()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()  # its reader went away
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _forget_output()
        print(f"{name}: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    except PagecastError as error:
        flagged = import_module("pagecast.cli.options").flagged if isinstance(error, StartError) else str
        hint = " (`pagecast serve` starts a server)" if str(error).endswith("Connection refused") else ""
        print(f"{name}: {flagged(str(error))}{hint}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0].startswith("pagecast"):
            raise
        command = name.removeprefix("pagecast ")
        extra = "conformance" if command == "conformance" else "serve"
        way = "`make setup` in a clone" if command == "bench" else f"pip install 'pagecast[{extra}]'"
        print(f"{name}: needs the package {error.name}; install it with: {way}", file=sys.stderr)
        return 2


def _forget_output() -> None:
    """Python would complain once more of what standard output does not take, when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
