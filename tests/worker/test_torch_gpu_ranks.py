"""On GPUs: a split model gives one rank's tokens, over gloo where ranks share a GPU, over NCCL and shared memory where each has one."""

from functools import cache
from pathlib import Path

import pytest
import torch
from worker.tiny_model import write_config

from pagecast import LLM, SamplingParams

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.timeout(600)]

PROMPTS = [list(range(5, 5 + length)) for length in (1, 3, 17, 40, 100)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PLAIN = SamplingParams(temperature=1.1, seed=12, max_tokens=32, ignore_eos=True)
TOP_K = SamplingParams(temperature=0.9, top_k=40, seed=13, max_tokens=32, ignore_eos=True)
TOP_P = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=32, ignore_eos=True)
MIN_P = SamplingParams(temperature=0.9, min_p=0.05, seed=14, max_tokens=32, ignore_eos=True)
KINDS = {
    "greedy": GREEDY, "plain": PLAIN, "top-k": TOP_K, "top-p": TOP_P, "min-p": MIN_P, "side by side": [GREEDY, PLAIN, TOP_K, TOP_P, MIN_P],
}
"""The first two need each rank's best token only; the others filter, so their steps gather the logits of every row."""
OPTIONS = {"dtype": "float32", "num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape whose weights are made up, the same for any number of ranks."""
    return write_config(
        tmp_path_factory.mktemp("shape"), hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=4000,
    )


def tokens(folder: Path, **options: object) -> dict[str, list[tuple[int, ...]]]:
    """By kind of sampling."""
    with LLM(random_weights=str(folder), **OPTIONS | options) as llm:
        return {name: [output.outputs[0].token_ids for output in llm.generate(PROMPTS, kind)] for name, kind in KINDS.items()}


@cache
def alone(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    return tokens(folder, device="cuda:0")


@pytest.mark.parametrize("ranks", [2, 4], ids=["heads split", "KV heads replicated"])
def test_ranks_that_share_a_gpu(folder: Path, ranks: int) -> None:
    assert tokens(folder, device="cuda:0", tensor_parallel_size=ranks) == alone(folder)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_ranks_with_a_gpu_each(folder: Path, enforce_eager: bool) -> None:
    assert tokens(folder, tensor_parallel_size=2, enforce_eager=enforce_eager) == alone(folder)
