"""Result files: one JSON object a run, with what is needed to run it again and to believe it.

Owns the format of benchmarks/results/*.json. Every figure that a target may refer to stands in `metrics` under a dotted name.
"""

import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pagecast.errors import PagecastError

PACKAGES = ("pagecast", "torch", "triton", "transformers", "grpcio", "pyzmq", "msgspec", "numpy", "vllm")

RESULTS = "benchmarks/results"
"""Where a repository keeps result files."""


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90 and p99 of a sample (linear interpolation); empty for an empty one."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"mean": statistics.fmean(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def machine() -> str:
    """One line: GPUs if there are any, processor, cores."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    cores = len(os.sched_getaffinity(0))
    return "; ".join([*gpus, f"{platform.machine()}, {cores} cores", f"Python {platform.python_version()}"])


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a figure."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line(words: Sequence[str]) -> str:
    """The command with these arguments, as the reader of a result can give it.

    Paths below the working directory become relative; of others, which no other machine has, the last name stays. Results that went to
    such a folder go to RESULTS.
    """
    told: list[str] = []
    pieces = [word.split("=", 1) if re.match(r"--[a-z-]+=/", word) else [word] for word in words]
    for word in itertools.chain.from_iterable(pieces):
        path = Path(word)
        if not path.is_absolute():
            told.append(word)
        elif path.is_relative_to(Path.cwd()):
            told.append(str(path.relative_to(Path.cwd())))
        else:
            told.append(RESULTS if told[-1:] == ["--results"] else path.name)
    return shlex.join(["pagecast", *told])


def provenance(now: datetime) -> dict[str, Any]:
    """What printed a figure, when, and on what machine."""
    command = command_line(sys.argv[1:])
    when = {"date": f"{now:%Y-%m-%d}", "time": f"{now:%H:%M:%S}Z"}
    return {"command": command} | when | {"machine": machine(), "versions": versions()}


class CannotWrite(PagecastError):
    """Figures would have nowhere to go."""

    exit_code = 2


def check_folder(folder: str | None) -> None:
    """Before anything is measured: raises CannotWrite where `write` could not."""
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise CannotWrite(f"cannot write results to {folder}: {error.strerror}") from None


def check_file(path: str | None) -> None:
    """The same for one file, whose folder is made."""
    try:
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            open(path, "a").close()
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}") from None


def write(folder: str, name: str, metrics: dict[str, float], details: dict[str, Any]) -> Path:
    """Write `folder/<date>-<name>.json` and return its path. metrics: dotted name to figure; details: everything else."""
    now = datetime.now(UTC)
    path = Path(folder) / f"{now:%Y%m%dT%H%M%S}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"name": name} | provenance(now) | {"metrics": metrics}
    path.write_text(json.dumps(record | details, indent=1) + "\n")
    return path


def read_all(folder: str) -> list[dict[str, Any]]:
    """Every result file of `folder`, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
