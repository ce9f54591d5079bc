"""`pagecast keys FOLDER`: keys for the link between scheduler and ranks on several hosts. Never replaces one that is there."""

import argparse
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="gets scheduler.key, for the scheduler's host, and rank.key, for all with ranks")


def run(args: argparse.Namespace) -> int:
    import zmq

    from pagecast_wire.keys import RankKeys, SchedulerKeys, write_keys

    if not args.folder:
        print("pagecast keys: FOLDER must not be empty; `.` is this folder", file=sys.stderr)
        return 2
    shown = os.fsencode(args.folder).decode(errors="replace")
    (public, secret), (rank_public, rank_secret) = [tuple(half.decode() for half in zmq.curve_keypair()) for _ in range(2)]
    try:
        write_keys(Path(args.folder), SchedulerKeys(public, secret, (rank_public,)), RankKeys(rank_public, rank_secret, public))
    except FileExistsError as error:
        print(f"pagecast keys: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"pagecast keys: cannot write to {shown}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{shown}: scheduler.key for the scheduler's host, rank.key for every host with ranks")
    return 0
