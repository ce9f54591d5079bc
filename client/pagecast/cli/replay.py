"""`pagecast replay FILE`: run a recording of a scheduler again, name the first difference, draw the timeline."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `pagecast serve --record FILE` wrote")
    parser.add_argument("--picture", metavar="PNG", help="draw block use, running, waiting and preemptions over plans")
    parser.add_argument("--times", action="store_true", help="run nothing again: tell by kinds of steps where its time went")


def run(args: argparse.Namespace) -> int:
    return show_times(args.file) if args.times else replay(args.file, args.picture)


def show_times(file: str) -> int:
    """0: printed; 1: the file cannot be read."""
    from pagecast_scheduler.engine.replay import RecordingError
    from pagecast_scheduler.engine.step_times import step_times, table

    try:
        print(*table(step_times(file)), sep="\n")
    except (OSError, RecordingError) as error:
        return _unreadable(file, error)
    return 0


def _unreadable(file: str, error: Exception) -> int:
    reason = (error.strerror or "cannot be read") if isinstance(error, OSError) else str(error)
    print(f"pagecast replay: {file}: {reason}", file=sys.stderr)
    return 1


def replay(file: str, picture: str | None) -> int:
    """0: the core makes the same plans again; 1: it does not, or the file cannot be read."""
    from pagecast_scheduler.engine.replay import RecordingError, draw
    from pagecast_scheduler.engine.replay import replay as run_again

    try:
        result = run_again(file)
    except (OSError, RecordingError) as error:
        return _unreadable(file, error)
    print(f"{result.num_requests} requests, {result.num_plans} plans, {result.num_results} results")
    if picture:
        try:
            draw(result, picture)
        except (OSError, ValueError) as error:  # ValueError: a format that there is none of
            reason = (error.strerror or "cannot be written") if isinstance(error, OSError) else str(error)
            print(f"pagecast replay: {picture}: {reason}", file=sys.stderr)
            return 1
        print(f"timeline: {picture}")
    if not result.compared:
        print("recorded without token ids, so the plans cannot be made again; `pagecast serve --record-tokens` keeps them")
        return 0
    if result.difference is None:
        print("every plan is the same")
        return 0
    at = result.difference
    print(f"first difference: epoch {at.epoch} step {at.step} field {at.field}\n  recorded: {at.recorded}\n  now:      {at.now}")
    return 1
