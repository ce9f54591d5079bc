"""`pagecast bench quantization`: perplexity of one text under every way of rounding a model, each served by the engine itself."""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from pagecast import models
from pagecast.cli import perplexity
from pagecast.cli.quantities import COUNT, Whole
from pagecast.cli.quantize import CannotQuantize, text_of
from pagecast.cli.quantize import run as write_quantized

_ALPHABETICAL = "the language reference in Python's pydoc_data.topics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=models.DEFAULT_MODEL, metavar="MODEL", help="as for serve (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help=f"a UTF-8 text; its second half calibrates (default: {_ALPHABETICAL})")
    parser.add_argument("--tokens", type=Whole(2), default=16384, metavar="N", help="tokens to judge by (default: %(default)s)")
    parser.add_argument("--window", type=Whole(2), default=1024, metavar="N", help="tokens that belong together (default: %(default)s)")
    parser.add_argument("--samples", type=COUNT, default=64, metavar="N", help="pieces of 512 tokens that calibrate (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--results", default="benchmarks/results", metavar="FOLDER", help="where the result file goes")


def run(args: argparse.Namespace) -> int:
    from pagecast.bench import results

    results.check_folder(args.results)
    text = text_of(args.text)
    judged, rest = text[: len(text) // 2], text[len(text) // 2 :]
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="pagecast-quantization-") as folder:
        calibration = Path(folder, "calibration.txt")
        calibration.write_text(rest, encoding="utf-8")
        for name, model, options in _variants(args, Path(folder), calibration):
            found = perplexity.measure(model, judged, args.window, args.tokens, {"device": args.device, **options})
            rows.append((name, found["perplexity"], found["standard_error"]))
            print(f"{name}: {found['perplexity']:.4f}", flush=True)
    print(table(rows))
    metrics = {f"quantization.{models.display_name(args.model)}.{name.replace(' ', '_')}.perplexity": value for name, value, _ in rows}
    details = {"tokens": args.tokens, "window": args.window, "text": args.text or _ALPHABETICAL, "samples": args.samples}
    print(results.write(args.results, "quantization", metrics, details))
    return 0


def _variants(args: argparse.Namespace, folder: Path, calibration: Path) -> Any:
    """Name, model and options of serve, of one way after the other. What has to be written for one is written when it is reached."""
    yield "float32", args.model, {"dtype": "float32"}
    yield "bfloat16", args.model, {"dtype": "bfloat16"}
    yield "fp8 weights and activations", args.model, {"dtype": "float32", "quantization": "fp8"}
    yield "fp8 KV cache", args.model, {"dtype": "float32", "kv_cache_dtype": "fp8"}
    given = {"group_size": 128, "samples": args.samples, "sample_tokens": 512, "device": args.device, "model": args.model}
    for method, name in (("fp8", "fp8 calibrated"), ("rtn-int4", "int4 g128 nearest"), ("gptq", "int4 g128 GPTQ")):
        out = folder / method
        chosen = None if method == "rtn-int4" else str(calibration)
        begin = time.perf_counter()
        if write_quantized(argparse.Namespace(**given, out=str(out), to=method, calibration=chosen)):
            raise CannotQuantize(f"{method} failed")
        print(f"{method}: written in {time.perf_counter() - begin:.0f} s", flush=True)
        yield name, str(out), {"dtype": "float32"}


def table(rows: list[tuple[str, float, float]]) -> str:
    """Markdown; the first row is what the others are held against."""
    lines = ["| | perplexity | against the first |", "|-|-|-|"]
    lines += [f"| {name} | {value:.3f} ± {error:.3f} | {100 * (value / rows[0][1] - 1):+.2f} % |" for name, value, error in rows]
    return "\n".join(lines)
