"""`pagecast pull ORG/MODEL`: fetches a model from a hub, so that `serve ORG/MODEL` starts without the network."""

import argparse
import sys

from pagecast import hub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ORG/MODEL", help="the model's name at the hub")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace) -> int:
    if not hub.is_hub_name(args.model):
        print(f"pagecast pull: a model at a hub is named ORG/MODEL, not {args.model!r}", file=sys.stderr)
        return 2
    print(hub.pull(args.model, args.revision))
    return 0
