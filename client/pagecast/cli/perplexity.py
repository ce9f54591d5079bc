"""`pagecast perplexity MODEL TEXT`: how well a model foretells a text, through the engine that serves it.

The text is cut into windows of tokens that know nothing of each other; each of a window's tokens but the first counts, given those
before it. The lower the better; only figures of one text, one tokenizer and one window compare.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from pagecast.cli import options
from pagecast.cli.quantities import Whole
from pagecast.errors import PagecastError

_PASSED_ON = ("dtype", "device", "quantization", "kv_cache_dtype", "tensor_parallel_size", "gpu_memory_utilization", "cpu_kv_gib",
              "enforce_eager", "tokenizer")
_AT_ONCE = 8


class BadText(PagecastError):
    """A text that cannot be measured."""

    exit_code = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as for serve")
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file; - reads standard input")
    parser.add_argument("--window", type=Whole(2), default=1024, metavar="N", help="tokens that belong together (default: %(default)s)")
    parser.add_argument("--max-tokens", type=Whole(2), metavar="N", help="only the first N tokens of the text")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")
    options.add(parser, (option for option in options.of(options.SERVE) if option.name in _PASSED_ON))


def windows(tokens: list[int], size: int) -> list[list[int]]:
    """The tokens in windows of `size`; a rest of fewer than two is left out."""
    cut = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return [window for window in cut if len(window) > 1]


def figures(logprobs: list[list[float]]) -> dict[str, float]:
    """perplexity = exp(mean negative log-likelihood), its standard error over tokens, and how many tokens counted."""
    flat = [value for window in logprobs for value in window]
    mean = -sum(flat) / len(flat)
    spread = math.sqrt(sum((-value - mean) ** 2 for value in flat) / max(len(flat) - 1, 1))
    perplexity = math.exp(mean)
    return {
        "perplexity": perplexity, "standard_error": perplexity * spread / math.sqrt(len(flat)), "bits_per_token": mean / math.log(2),
        "tokens": len(flat), "windows": len(logprobs),
    }  # fmt: skip


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise BadText(f"{name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadText(f"{name}: not UTF-8 text") from None


def run(args: argparse.Namespace) -> int:
    text = _read(args.text)
    given = {name: getattr(args, name) for name in _PASSED_ON if getattr(args, name, None) is not None}
    start = time.perf_counter()
    found = measure(args.model, text, args.window, args.max_tokens, given)
    found["seconds"] = time.perf_counter() - start
    if args.json:
        print(json.dumps({"model": args.model, "window": args.window, **given, **found}))
    else:
        print(f"perplexity {found['perplexity']:.4f} ± {found['standard_error']:.4f} over {int(found['tokens'])} tokens "
              f"in {int(found['windows'])} windows of {args.window}")  # fmt: skip
    return 0


def measure(model: str, text: str, window: int, max_tokens: int | None, given: dict[str, Any]) -> dict[str, float]:
    """Starts a cluster, scores the text, ends the cluster. given: options of serve."""
    from pagecast import Client, SamplingParams
    from pagecast.bench.progress import Progress
    from pagecast.llm import LLM

    limits = {"max_num_seqs": _AT_ONCE, "max_model_len": window + 1, "max_num_batched_tokens": max(window, 2048)}
    with LLM(model, enable_prefix_caching=False, **limits, **given) as llm:
        with Client(llm.target) as client:
            tokens = list(client.tokenize(text))[:max_tokens]
        parts = windows(tokens, window)
        if not parts:
            raise BadText("the text must have at least 2 tokens")
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        progress, scores = Progress(len(parts), stream=sys.stderr), []
        for first in range(0, len(parts), _AT_ONCE):
            for output in llm.generate(parts[first : first + _AT_ONCE], sampling):
                # The first token is given nothing before it and has no probability.
                scores.append([token.logprob for token in output.prompt_logprobs if token.logprob is not None])
                so_far = figures(scores)["perplexity"]
                progress.advance(f"window {len(scores)} of {len(parts)}, perplexity so far {so_far:.3f}")
        progress.close()
    return figures(scores)
