"""Arguments that the client commands share: where the server is, and how to sample."""

import argparse

from pagecast import channel
from pagecast.sampling import SamplingParams


def add_target(parser: argparse.ArgumentParser, timeout: float | None = None) -> None:
    """timeout: seconds, unless another is given; None waits for ever."""
    parser.add_argument("--target", default=channel.DEFAULT_TARGET, metavar="HOST:PORT", help="server to ask (default: %(default)s)")
    default = "never" if timeout is None else f"{timeout:g}"
    parser.add_argument("--timeout", type=_seconds, default=timeout, metavar="SECONDS", help=f"give up after so long (default: {default})")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to the server."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="output tokens at most (default: what fits the model's length)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up this share")
    parser.add_argument("--min-p", type=float, metavar="P", help="keep tokens at least this share as likely as the likeliest")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, not {text}")
    return value


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed, max_tokens=args.max_tokens,
        stop=args.stop,
    )
