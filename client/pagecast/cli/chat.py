"""`pagecast chat`: a conversation, which goes on from the first answer where several are asked for.

Ctrl-C stops an answer and keeps what was said; /exit, Ctrl-D, or Ctrl-C at the prompt end it."""

import argparse
import contextlib
import sys
import time

from pagecast.cli import arguments
from pagecast.cli.answer import Answer, show
from pagecast.errors import RpcError
from pagecast.types import ChatMessage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="how the assistant is to behave")
    arguments.add_target(parser)
    arguments.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    history = [ChatMessage("system", args.system)] if args.system else []
    sampling, options = arguments.sampling(args), arguments.request_options(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and its history
    if sys.stdin.isatty():
        print("Ctrl-C stops an answer, /exit ends.")
    with arguments.connect(args) as client:
        arguments.reach(client, args.timeout)
        while True:
            answer = Answer()
            try:
                if (line := _next_line()) is None:
                    return 0
                history.append(ChatMessage("user", line))
                start = time.perf_counter()
                with client.stream(history, sampling, **options) as stream:
                    show(stream, answer, start)
            except UnicodeError:
                print("pagecast chat: what was given is not UTF-8 text", file=sys.stderr)
                return 2
            except ValueError as error:  # a flag's value, which the next line would meet as well
                print(f"pagecast chat: {error}", file=sys.stderr)
                return 2
            except RpcError as error:
                print(f"pagecast chat: {error}", file=sys.stderr)
                if not sys.stdin.isatty():
                    return 1
                history.pop()
                continue
            history.append(ChatMessage("assistant", answer.text))


def _next_line() -> str | None:
    """The next thing the user says; None at the end of the conversation."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if line == "/exit":
            return None
        if line:
            return line
