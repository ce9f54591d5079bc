"""A few families through the whole gRPC chain: greedy tokens are those that transformers would choose, text in and text out."""

import json
from pathlib import Path

import pytest
import torch
from worker.family_model import write_family

from pagecast import LLM, Client, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TEXTS = ["a", "The capital of France is", "好" * 20]
TIE = 1e-4

pytestmark = pytest.mark.timeout(300)


def write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place + 3 for place, letter in enumerate(alphabet)} | {"<s>": 1, "</s>": 2}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')


@torch.inference_mode()
def behind(model: torch.nn.Module, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    """By how much the largest logit is above a token's, at most."""
    logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return float((logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())


@pytest.mark.parametrize(("name", "ranks"), [("Gemma3ForCausalLM", 1), ("Qwen3MoeForCausalLM", 2), ("DeepseekV3ForCausalLM", 1)])
def test_greedy_tokens_through_the_whole_chain(tmp_path: Path, name: str, ranks: int) -> None:
    folder, model = write_family(name, tmp_path, vocab_size=320)
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "eos_token_id": 2}))
    options = {"dtype": "float32", "num_blocks": 24, "max_num_seqs": 4, "tensor_parallel_size": ranks, "check_invariants": True}
    with LLM(str(folder), **options) as llm, Client(llm.target) as client:
        prompts = [client.tokenize(text) for text in TEXTS]
        for prompt, output in zip(prompts, llm.generate(TEXTS, GREEDY), strict=True):
            tokens = output.outputs[0].token_ids
            assert len(tokens) == GREEDY.max_tokens and behind(model, tuple(prompt), tuple(tokens)) < TIE
        assert client.models()[0].architecture == name
