"""`pagecast bench startup`: seconds from starting a private cluster to SERVING and to the first token, several starts in a row, and what
rank 0 spent them on."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagecast.bench import model_shapes, results
from pagecast.cli.quantities import COUNT
from pagecast.models import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL", help="as for serve")
    parser.add_argument("--random-weights", choices=model_shapes.SHAPES, metavar="SHAPE",
                        help=f"a model shape instead of a model: {', '.join(model_shapes.SHAPES)}")
    parser.add_argument("--checkpoint", metavar="FOLDER",
                        help="start from safetensors files of the shape in FOLDER, written there first if they are missing (8B: 16 GB)")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, metavar="MODEL", help="for --checkpoint, which has none; the prompt is ids")
    parser.add_argument("--starts", type=COUNT, default=2, help="the first fills the kernel cache; of several the last is the warm one")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file and the processes' log go")
    parser.set_defaults(usage_error=parser.error)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the call to SERVING and to the first token of a 16-token prompt; kv_tokens: tokens the KV pool holds. phases: seconds
    that rank 0 was in each, by name: `start` is everything before its first report (spawning, imports, reading headers), `join`
    everything after its last report (its log goes on in the results folder)."""

    serving_s: float
    first_token_s: float
    kv_tokens: int
    phases: dict[str, float]


@dataclass(slots=True)
class Phases:
    """When rank 0 was first heard to be in each phase, in seconds of the performance counter."""

    began: dict[str, float]
    ended: float = 0.0
    _last: str = field(default="start", init=False)

    def note(self, event: object) -> None:
        """Takes what the supervisor tells."""
        from pagecast_scheduler.launch.events import Loading

        if not isinstance(event, Loading) or event.rank != 0:
            return
        now = time.perf_counter()
        if event.phase != self._last:
            self.began.setdefault(event.phase, now)
            self._last = event.phase
        self.ended = now

    def seconds(self, until: float) -> dict[str, float]:
        """Lengths of the phases. until: when the cluster served."""
        ended = self.ended or until
        names, times = list(self.began), [*self.began.values(), ended, until]
        return {name: round(after - at, 2) for name, at, after in zip([*names, "join"], times, times[1:], strict=False)}


def one_start(model: dict[str, str], log: Callable[[str, str], None]) -> Start:
    """model: options that name it. log: told every line of a process, after its name."""
    from pagecast import cluster
    from pagecast.sampling import SamplingParams
    from pagecast.sync import Client

    begin = time.perf_counter()
    phases = Phases({"start": begin})
    with cluster.PrivateCluster(cluster.settings(**model), cluster.Watch(phases.note, log)) as private:
        now = time.perf_counter()
        serving, spent = now - begin, phases.seconds(now)
        with Client(private.target) as client:
            client.generate(list(range(10, 26)), SamplingParams(max_tokens=1, ignore_eos=True))
            first = time.perf_counter() - begin
            pool = client.models()[0].limits.max_pool_tokens
        return Start(round(serving, 2), round(first, 2), pool, spent)


def make_checkpoint(folder: str, shape: str) -> None:
    """Write a checkpoint in a process that has ended, and left the device, before anything starts. Leaves what is there already."""
    if list(Path(folder).glob("*.safetensors")):
        return
    begin = time.perf_counter()
    code = f"import sys; from {__name__} import write_checkpoint; write_checkpoint(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, folder, shape], check=True)
    print(f"checkpoint written in {time.perf_counter() - begin:.1f} s", flush=True)


def write_checkpoint(folder: str, shape: str) -> None:
    """Sharded safetensors files of random bfloat16 weights, in transformers' layout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_shapes.write(shape, folder))
    loader: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = loader.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")


def metrics_of(name: str, starts: list[dict[str, Any]]) -> dict[str, float]:
    """startup.NAME.first, and .last of several: seconds, also of the phases; startup.NAME.kv_tokens."""
    metrics: dict[str, float] = {f"startup.{name}.kv_tokens": starts[-1]["kv_tokens"]}
    for which, found in zip(("first", "last"), (starts[0], *starts[1:][-1:]), strict=False):
        shown = {key: value for key, value in found.items() if key not in ("kv_tokens", "phases")}
        shown |= {f"phases.{phase}": seconds for phase, seconds in found["phases"].items()}
        metrics |= {f"startup.{name}.{which}.{key}": value for key, value in shown.items()}
    return metrics


def run(args: argparse.Namespace) -> int:
    if args.checkpoint and not args.random_weights:
        args.usage_error("--checkpoint needs --random-weights")
    results.check_folder(args.results)
    name = args.random_weights or args.model
    starts = []
    with tempfile.TemporaryDirectory() as folder, (Path(args.results) / f"startup-{name}.log").open("w") as log:
        if args.checkpoint:
            make_checkpoint(args.checkpoint, name)
            model = {"model": args.checkpoint, "tokenizer": args.tokenizer}
        else:
            model = {"random_weights": model_shapes.write(name, folder)} if args.random_weights else {"model": name}
        for number in range(args.starts):
            start = one_start(model, lambda process, line: print(f"{process}: {line}", file=log, flush=True))
            starts.append(asdict(start))
            print(f"start {number + 1}: serving after {start.serving_s} s, first token after {start.first_token_s} s; rank 0: "
                  + ", ".join(f"{phase} {seconds} s" for phase, seconds in start.phases.items()), flush=True)
    print(f"written to {results.write(args.results, f'startup-{name}', metrics_of(name, starts), {'starts': starts})}")
    return 0
