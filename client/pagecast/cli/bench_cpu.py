"""Pagecast on the CPU beside transformers' generate, same model file, same prompts, in one run: A-B-A-B, medians.

Greedy, no end of sequence, so that both compute the same number of tokens. Ours goes the whole way through gRPC, scheduler and
worker. transformers gets whichever of float32 and bfloat16 it is faster with here.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from pagecast import models
from pagecast.bench import results
from pagecast.cli.quantities import COUNT, Whole
from pagecast.llm import LLM
from pagecast.sampling import SamplingParams

TOPICS = (
    "rivers", "glaciers", "bridges", "bees", "violins", "tides", "maps", "clocks", "bread", "kites", "lanterns", "deserts", "whales",
    "trains", "orchards", "comets",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=models.DEFAULT_MODEL, metavar="MODEL", help="as for serve (default: %(default)s)")
    parser.add_argument("--tokens", type=Whole(2), default=64, metavar="N", help="output tokens of each request (default: %(default)s)")
    parser.add_argument("--repetitions", type=COUNT, default=3, metavar="N", help="rounds; the median counts (default: %(default)s)")
    parser.add_argument("--results", metavar="FOLDER", help="write the result there too, e.g. benchmarks/results")


class Transformers:
    """The peer: one model in this process, in its faster number format."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        quiet: Any = logging
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        path = models.resolve(model)
        where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name} if path.is_file() else {
            "pretrained_model_name_or_path": path}
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(**where)
        loader: Any = AutoModelForCausalLM
        speeds = {}
        for dtype in (torch.float32, torch.bfloat16):
            self._model = loader.from_pretrained(**where, dtype=dtype).eval()
            self.run([1, 2, 3], 2)
            start = time.perf_counter()
            self.run([1, 2, 3], 8)
            speeds[dtype] = (time.perf_counter() - start, self._model)
        self._model = min(speeds.values(), key=lambda pair: pair[0])[1]
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def run(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy continuation of exactly `tokens` tokens."""
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return list(out[0, len(prompt):].tolist())


def seconds(work: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def run(args: argparse.Namespace) -> int:
    results.check_folder(args.results)
    peer = Transformers(args.model)
    prompts = [peer.encode(f"A short article about {topic}.\n\nThe history of {topic} begins") for topic in TOPICS]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {"ours_one": [], "theirs_one": [], "ours_all": []}
    with LLM(args.model, max_num_seqs=len(prompts), enable_prefix_caching=False) as llm:
        llm.generate(prompts, params)
        peer.run(prompts[0], args.tokens)
        for number in range(args.repetitions):
            prompt = prompts[number % len(prompts)]
            times["ours_one"].append(seconds(llm.generate, [prompt], params))
            times["theirs_one"].append(seconds(peer.run, prompt, args.tokens))
            times["ours_all"].append(seconds(llm.generate, prompts, params))
            print(f"round {number + 1}: " + ", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in times.items()), flush=True)
    return report(args, times, peer.dtype)


def report(args: argparse.Namespace, times: dict[str, list[float]], peer_dtype: str) -> int:
    """Print rates and ratios, and write the file if asked."""
    one, theirs, together = (statistics.median(times[name]) for name in ("ours_one", "theirs_one", "ours_all"))
    rates = {"ours_one": args.tokens / one, "theirs_one": args.tokens / theirs, "ours_all": len(TOPICS) * args.tokens / together}
    single, batch = theirs / one, rates["ours_all"] / rates["theirs_one"]
    print(f"transformers, one request ({peer_dtype}): {rates['theirs_one']:7.1f} tokens/s")
    print(f"Pagecast, one request:               {rates['ours_one']:7.1f} tokens/s  {single:.2f} times transformers")
    print(f"Pagecast, {len(TOPICS)} requests at once:       {rates['ours_all']:7.1f} tokens/s  {batch:.2f} times transformers in sequence")
    if args.results:
        metrics = {"cpu.single.ratio_transformers": round(single, 3), f"cpu.batch{len(TOPICS)}.ratio_transformers": round(batch, 3)}
        metrics |= {f"cpu.{name}.out_tok_s": round(rate, 1) for name, rate in rates.items()}
        details = {"runs_s": times, "peer_dtype": peer_dtype, "tokens": args.tokens, "model": models.display_name(args.model)}
        print(f"written to {results.write(args.results, 'cpu', metrics, details)}")
    return 0
