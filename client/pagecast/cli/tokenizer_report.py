"""`pagecast tokenizer-report MODEL...`: how many tokens a character costs, by language: what a user of that language pays per model."""

import argparse
import sys
from importlib import import_module
from typing import Any

from pagecast import models
from pagecast.cli.sample_texts import SAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", metavar="MODEL", help="folder, .gguf file, ORG/MODEL once pulled, or a packaged model's name")


def run(args: argparse.Namespace) -> int:
    load = import_module("pagecast_scheduler.frontend.tokenizer").load_tokenizer
    paths = [str(models.resolve(name)) for name in args.model]
    print("tokens per character".ljust(24), *(f"{name:>10}" for name in SAMPLES), f"{'zh : en':>10}", "  vocabulary")
    wrong = 0
    for name, path in zip(args.model, paths, strict=True):
        try:
            tokenizer = load(path)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            print(f"pagecast tokenizer-report: {name}: no tokenizer can be made of it: {reason}", file=sys.stderr)
            wrong = 1
            continue
        costs = {language: cost(tokenizer, text) for language, text in SAMPLES.items()}
        figures = [f"{value:>10.3f}" for value in costs.values()]
        size = len(tokenizer.token_bytes) if tokenizer.token_bytes is not None else tokenizer.backend.get_vocab_size()
        print(models.display_name(name)[:24].ljust(24), *figures, f"{costs['Chinese'] / costs['English']:>10.2f}", f"  {size:,}")
    return wrong


def cost(tokenizer: Any, text: str) -> float:
    """Tokens per character of a text, without special tokens."""
    return len(tokenizer.encode(text, False)) / len(text)
