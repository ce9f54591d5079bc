"""`pagecast bench startup`: seconds from starting a private cluster to SERVING and to the first token, several starts in a row."""

import argparse
import tempfile
import time

from pagecast.bench import model_shapes, results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--random-weights", metavar="SHAPE", help="a model shape instead of a model")
    parser.add_argument("--starts", type=int, default=2, help="the first fills the kernel cache; the last is reported as the warm one")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")


def one_start(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds to SERVING and to the first token of a 16-token prompt."""
    from pagecast.llm import LLM
    from pagecast.sampling import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = {"random_weights": model_shapes.write(args.random_weights, folder)} if args.random_weights else {"model": args.model}
        begin = time.perf_counter()
        llm = LLM(**model)
        serving = time.perf_counter() - begin
        try:
            llm.generate([list(range(10, 26))], SamplingParams(max_tokens=1, ignore_eos=True))
            return serving, time.perf_counter() - begin
        finally:
            llm.close()


def run(args: argparse.Namespace) -> int:
    name = args.random_weights or args.model
    starts = []
    for number in range(args.starts):
        serving, first = one_start(args)
        starts.append({"serving_s": round(serving, 2), "first_token_s": round(first, 2)})
        print(f"start {number + 1}: serving after {serving:.2f} s, first token after {first:.2f} s", flush=True)
    named = (("first", starts[0]), ("last", starts[-1]))
    metrics = {f"startup.{name}.{which}.{key}": value for which, start in named for key, value in start.items()}
    print(f"written to {results.write(args.json, f'startup-{name}', metrics, {'starts': starts})}")
    return 0
