"""`pagecast conformance --target HOST:PORT`: holds any endpoint to the public contract, shows progress, and exits 1 on a broken promise."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc

from pagecast.cli import arguments
from pagecast.cli.quantities import COUNT
from pagecast.conformance import cases, runner
from pagecast.conformance.endpoint import Endpoint
from pagecast.errors import PagecastError, from_rpc


class WrongUse(PagecastError):
    """A group that there is not, or a value that cannot be worked with."""

    exit_code = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_server(parser)
    parser.add_argument("--group", action="append", metavar="NAME", help="run this group alone; may be given several times")
    parser.add_argument("--schemas", type=COUNT, metavar="N", help="random JSON Schemas to try (default: 200)")
    parser.add_argument("--list", action="store_true", help="list the cases and run none; needs no server")
    parser.add_argument("--json", metavar="FILE", help="write the results there as JSON")


def run(args: argparse.Namespace) -> int:
    """The command."""
    import_module("jsonschema")  # said now if it is not there, not after half of the cases
    if args.list:
        print("\n".join(f"{case.group}: {case.name}" for case in _chosen(args, list(cases.load(None)))))
        return 0
    if args.json is not None:
        try:
            open(args.json, "a").close()  # said now, not after all the cases
        except OSError as error:
            raise WrongUse(f"cannot write {args.json}: {error.strerror}") from None
    try:
        results = asyncio.run(_run(args))
    except grpc.RpcError as error:
        raise from_rpc(error) from None
    if args.json is not None:
        rows = [{"group": r.case.group, "name": r.case.name, "outcome": r.outcome, "remark": r.remark} for r in results]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    _summary(results)
    return 1 if any(r.outcome == "failed" for r in results) or not results else 0


async def _run(args: argparse.Namespace) -> list[runner.Result]:
    async with Endpoint(args.target, **arguments.access(args)) as endpoint:
        chosen = _chosen(args, list(cases.load(endpoint.model)))
        results = []
        with _progress() as progress:
            task = None if progress is None else progress.add_task("", total=len(chosen))
            async for result in runner.run(endpoint, chosen):
                results.append(result)
                if progress is not None:
                    progress.update(task, advance=result.case.check != "canary", description=result.case.group)
                if result.outcome == "failed":
                    (print if progress is None else progress.console.print)(_line(result))
        return results


def _chosen(args: argparse.Namespace, known: Sequence[cases.Case]) -> list[cases.Case]:
    names = {case.group for case in known}
    wrong = sorted(set(args.group or ()) - names)
    if wrong:
        raise WrongUse(f"no group {wrong[0]!r}; there are {', '.join(sorted(names))}")
    chosen = [case for case in known if not args.group or case.group in args.group]
    if args.schemas is not None:
        chosen = [replace(c, data={**c.data, "count": args.schemas}) if c.check == "schemas" else c for c in chosen]
    return chosen


def _progress() -> Any:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stdout.isatty():
        return nullcontext()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True)


def _line(result: runner.Result) -> str:
    return f"{result.outcome}: {result.case.group}: {result.case.name}: {result.remark}"


def _summary(results: Sequence[runner.Result]) -> None:
    """One row for each group, and what was skipped."""
    groups: dict[str, list[runner.Result]] = {}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    print(f"{'group':<16} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>8}")
    for group, rows in groups.items():
        count = {outcome: sum(r.outcome == outcome for r in rows) for outcome in ("passed", "failed", "skipped")}
        seconds = sum(r.seconds for r in rows)
        print(f"{group:<16} {count['passed']:>6} {count['failed']:>6} {count['skipped']:>7} {seconds:>8.1f}")
    for why in sorted({r.remark for r in results if r.outcome == "skipped"}):
        print(f"skipped: {why}")
    failed = sum(r.outcome == "failed" for r in results)
    print("conformant" if results and not failed else f"{failed} of {len(results)} failed")
