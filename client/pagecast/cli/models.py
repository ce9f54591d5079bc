"""`pagecast models`: what a server's models are, what they can do and what they allow."""

import argparse
import json
from dataclasses import asdict

from pagecast.cli import arguments
from pagecast.types import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser, timeout=5.0)
    parser.add_argument("--json", action="store_true", help="one JSON array")


def run(args: argparse.Namespace) -> int:
    with arguments.connect(args) as client:
        found = client.models(timeout=args.timeout)
    if args.json:
        print(json.dumps([asdict(model) for model in found]))
    else:
        print("\n\n".join(describe(model) for model in found) or "no model is loaded yet")
    return 0 if found else 1


def describe(model: Model) -> str:
    """One model in lines of a name and a value."""
    limits = model.limits
    able = [name for name, has in (("chat", model.chat), ("prefix cache", model.prefix_cache)) if has]
    able += [f"constraints ({', '.join(model.constraints)})"] if model.constraints else []
    able += [f"{what} ({form})" for what, form in (("tool calls", model.tool_call_format), ("reasoning", model.reasoning_format)) if form]
    rows = {
        "model": model.name,
        "architecture": model.architecture,
        "digest": model.digest,
        "parameters": f"{model.num_parameters:,} as {model.dtype}" + (f", {model.quantization}" if model.quantization else ""),
        "vocabulary": f"{model.vocab_size:,} tokens, ends: {', '.join(map(str, model.end_token_ids)) or 'none'}",
        "KV cache": f"{model.kv_bytes_per_token:,} bytes a token, pool of {limits.max_pool_tokens:,} tokens, blocks of {limits.block_size}",
        "request": f"at most {limits.max_model_len:,} tokens, prompt and output together",
        "batch": f"{limits.max_num_seqs} sequences, {limits.max_num_batched_tokens:,} tokens a step",
        "can": ", ".join(able) or "plain text",
    }
    return "\n".join(f"{name:<13} {value}" for name, value in rows.items())
