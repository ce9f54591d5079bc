"""`pagecast bench NAME`: measurements. Each is a module bench_NAME.py beside this file, with the same two functions as a command."""

import argparse
import sys
from importlib import import_module
from pathlib import Path


def names() -> list[str]:
    """Every measurement there is."""
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=names(), help="what to measure; `pagecast bench NAME --help` lists its options")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from pagecast.cli.parser import Parser

    if args.name is None:
        print(f"pagecast bench: name what to measure: {', '.join(names())}", file=sys.stderr)
        return 2
    module = import_module(f"pagecast.cli.bench_{args.name}")
    parser = Parser(f"pagecast bench {args.name}", module.__doc__)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(args.rest)))
