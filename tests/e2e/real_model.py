"""What the real-model tests share: prompts of many kinds, and transformers' float32 model of the same file as the judge of every token."""

from functools import cached_property
from typing import Any

from pagecast.models import resolve

NUM_TOKENS = 64
TIE = 1e-4
"""Logits closer than this are a tie: either token is right."""

_STORY = "The keeper of the lighthouse counted the waves, wrote the number into a grey book, and lit the lamp again. "

PROMPTS: dict[str, str] = {
    "one token": "The",
    "fact": "The capital of France is",
    "question": "Q: Why is the sky blue?\nA:",
    "story": "Once upon a time, in a village by the sea, there lived a",
    "list": "Shopping list:\n1. milk\n2. bread\n3.",
    "dialogue": 'Alice said, "Did you see the comet last night?" Bob',
    "recipe": "To make a simple tomato soup, first",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "upper case": "IMPORTANT NOTICE: ALL VISITORS MUST",
    "chinese": "人工智能是计算机科学的一个分支，它",
    "chinese question": "问：中国的首都是哪里？\n答：",
    "mixed scripts": "The Chinese word 你好 means hello, and the Russian word привет means",
    "emoji": "Weather today: ☀️🌤️⛅🌧️ and tomorrow",
    "emoji family": "👨‍👩‍👧‍👦 is an emoji made of several others: 👨",
    "python": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Pagecast", "version": "0.1.0", "tags": ["grpc",',
    "sql": "SELECT city, COUNT(*) FROM customers GROUP BY",
    "spaces": "    indented\n\n\n\ttabs\tand   runs   of   spaces",
    "chat": "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "long": _STORY * 63,
}
"""Names are for messages; the last has about 1,500 tokens."""


class Reference:
    """transformers on the same GGUF file in float32. Judges a continuation in one teacher-forced pass, and remembers its verdicts."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        path = resolve("smollm2-135m")
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        path = resolve("smollm2-135m")
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text).input_ids)

    def greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """transformers' own generate, for the check that the teacher-forced pass says the same."""
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return tuple(out[0, len(prompt):].tolist())

    def complaint(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> str:
        """What is wrong with a greedy continuation, "" if nothing: each token must have the largest logit after all before it, or
        one that ties with the largest."""
        key = (prompt, output)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(prompt, output)
        return self._verdicts[key]

    def _judge(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> str:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([prompt + output[:-1]])
            logits = self._model(ids, logits_to_keep=len(output)).logits[0]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        gaps = logits.max(dim=1).values - chosen
        wrong = [offset for offset, gap in enumerate(gaps.tolist()) if gap > TIE]
        if not wrong:
            return ""
        first = wrong[0]
        best = int(logits[first].argmax())
        return f"token {first} is {output[first]}, not {best}: its logit is {gaps[first]:.2e} lower ({len(wrong)} of {len(output)} wrong)"
