"""`pagecast generate "PROMPT"`: one answer, streamed to standard output; figures go to standard error."""

import argparse
import sys
import time

from pagecast.cli import arguments
from pagecast.cli.answer import Answer, show
from pagecast.requests import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to go on from; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="ask as a user, through the model's chat template")
    parser.add_argument("--quiet", action="store_true", help="no figures at the end")
    arguments.add_target(parser)
    arguments.add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    answer = Answer()
    try:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        prompt: Prompt = [{"role": "user", "content": text}] if args.chat else text
        sampling = arguments.sampling(args)
        with arguments.connect(args) as client:
            arguments.reach(client, args.timeout)
            start = time.perf_counter()
            with client.stream(prompt, sampling, **arguments.request_options(args)) as stream:
                complete = show(stream, answer, start)
    except UnicodeError:  # of bytes that are no text Python makes what no encoding can write
        print("pagecast generate: what was given is not UTF-8 text", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"pagecast generate: {error}", file=sys.stderr)
        return 2
    if not args.quiet:
        print(answer.summary(), file=sys.stderr)
    return 0 if complete else 130
