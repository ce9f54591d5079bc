"""`pagecast bench report`: every target of benchmarks/targets.toml against the newest result that measured it.

Exits non-zero while a bar is missed or was never measured. `--write` records reached, date and command in the file.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from pagecast.bench import figures, results
from pagecast.cli.quantities import Number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", default="benchmarks/targets.toml", metavar="FILE", help="the targets")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="the result files")
    parser.add_argument("--group", help="only targets of this group")
    parser.add_argument("--write", action="store_true", help="record what was reached in the targets file")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (SVG) of the workloads beside vLLM")
    parser.add_argument("--dollars-per-hour", type=Number(above=0), help="price of the GPU: also say what a million tokens cost")
    parser.add_argument("--anchors", default="benchmarks/anchors.json", metavar="FILE", help="vLLM's figures where it did not run along")


def reached(target: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest record that holds the target's metric and was measured on the machine the target names."""
    for record in reversed(records):
        if target["metric"] in record["metrics"] and target.get("machine", "") in record["machine"]:
            return {"reached": round(record["metrics"][target["metric"]], 4), "date": record["date"], "command": record["command"]}
    return None


def meets(value: float, bound: float, direction: str) -> bool:
    """direction: "min" where more is better, "max" where less is."""
    return value >= bound if direction == "min" else value <= bound


def write_back(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Record what was reached, keeping the file's layout and comments."""
    import tomlkit

    document = tomlkit.parse(path.read_text())
    for table in document["target"]:
        table.update(found.get(table["id"], {}))
    path.write_text(tomlkit.dumps(document))


def compare(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """The picture, and what tokens cost, of the newest results."""
    rows = figures.comparisons(records, json.loads(Path(args.anchors).read_text()))
    if args.plot:
        Path(args.plot).write_text(figures.picture(rows))
        print(f"written to {args.plot}")
    for row in rows if args.dollars_per_hour else ():
        if row.unit == "req_s":
            continue
        kind = "output tokens" if row.unit == "out_tok_s" else "tokens"
        ours, peer = (figures.dollars_per_million(rate, args.dollars_per_hour) for rate in (row.ours, row.peer))
        print(f"{row.shape} {row.workload}: {row.ours:,.0f} {kind}/s, ${ours:.3f} a million; vLLM ${peer:.3f}")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    try:
        targets = tomllib.loads(Path(args.targets).read_text())["target"]
        records = results.read_all(args.results)
    except (OSError, ValueError, KeyError) as error:
        words = getattr(error, "strerror", None) or "it is not in the form of a targets file, or a result is not JSON"
        print(f"pagecast bench report: cannot read {getattr(error, 'filename', None) or args.targets}: {words}", file=sys.stderr)
        return 2
    table = Table("group", "target", "bar", "goal", "reached", "date", "verdict")
    found, missed = {}, 0
    for target in targets:
        if args.group and target["group"] != args.group:
            continue
        hit = reached(target, records)
        if hit:
            found[target["id"]] = hit
        verdict = "never measured"
        if hit and meets(hit["reached"], target["bar"], target["direction"]):
            goal_met = "goal" in target and meets(hit["reached"], target["goal"], target["direction"])
            verdict = "goal" if goal_met else "bar"
        elif hit:
            verdict = f"missed by {abs(hit['reached'] / target['bar'] - 1) * 100:.2g} %"
        missed += verdict not in ("bar", "goal")
        shown = str(hit["reached"]) if hit else "-"
        goal, date = str(target.get("goal", "")), hit["date"] if hit else ""
        table.add_row(target["group"], target["id"], str(target["bar"]), goal, shown, date, verdict)
    Console(width=150).print(table)
    if args.write:
        write_back(Path(args.targets), found)
    print(f"{missed} of {table.row_count} targets missed or not measured")
    if args.plot or args.dollars_per_hour:
        compare(args, records)
    return 1 if missed else 0
