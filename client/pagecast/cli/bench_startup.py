"""`pagecast bench startup`: seconds from starting a private cluster to SERVING and to the first token, several starts in a row."""

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagecast.bench import model_shapes, results
from pagecast.models import DEFAULT_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random-weights", metavar="SHAPE", help="a model shape instead of a model")
    parser.add_argument("--checkpoint", metavar="FOLDER",
                        help="start from safetensors files of the shape in FOLDER, written there first if they are missing (8B: 16 GB)")
    parser.add_argument("--starts", type=int, default=2, help="the first fills the kernel cache; the last is reported as the warm one")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the call to SERVING and to the first token of a 16-token prompt; kv_tokens: tokens the KV pool holds."""

    serving_s: float
    first_token_s: float
    kv_tokens: int


def one_start(model: dict[str, str]) -> Start:
    """model: what LLM is given."""
    from pagecast.llm import LLM
    from pagecast.sampling import SamplingParams
    from pagecast.sync import Client

    begin = time.perf_counter()
    with LLM(**model) as llm:  # type: ignore[arg-type]
        serving = time.perf_counter() - begin
        llm.generate([list(range(10, 26))], SamplingParams(max_tokens=1, ignore_eos=True))
        first = time.perf_counter() - begin
        with Client(llm.target) as client:
            pool = client.models()[0].limits.max_pool_tokens
        return Start(round(serving, 2), round(first, 2), pool)


def write_checkpoint(folder: str, shape: str) -> None:
    """A sharded safetensors checkpoint of random bfloat16 weights, in transformers' layout. Leaves what is there already."""
    path = Path(folder)
    if list(path.glob("*.safetensors")):
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_shapes.write(shape, folder))
    loader: Any = AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = loader.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")


def run(args: argparse.Namespace) -> int:
    name = args.random_weights or args.model
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint:
            write_checkpoint(args.checkpoint, name)
            model = {"model": args.checkpoint, "tokenizer": DEFAULT_MODEL}  # any that is there: the prompt is ids
        else:
            model = {"random_weights": model_shapes.write(name, folder)} if args.random_weights else {"model": name}
        for number in range(args.starts):
            start = one_start(model)
            starts.append(asdict(start))
            print(f"start {number + 1}: serving after {start.serving_s} s, first token after {start.first_token_s} s", flush=True)
    named = (("first", starts[0]), ("last", starts[-1]))
    metrics = {f"startup.{name}.{which}.{key}": value for which, start in named for key, value in start.items() if key != "kv_tokens"}
    metrics[f"startup.{name}.kv_tokens"] = starts[-1]["kv_tokens"]
    print(f"written to {results.write(args.json, f'startup-{name}', metrics, {'starts': starts})}")
    return 0
