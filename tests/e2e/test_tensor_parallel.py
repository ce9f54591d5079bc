"""A model split over ranks, through the whole gRPC chain: the tokens of one rank, whatever the number of ranks.

The ranks are processes that meet over gloo. Greedy tokens are held to transformers, which teacher-forces near-ties; sampled ones to
those of one rank. The pool is so small that requests are preempted, and every prompt comes twice, the second time from cached blocks.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from e2e.launch_roles import Events, started
from e2e.real_model import PROMPTS, Reference
from worker.tiny_model import write_model, write_tokenizer

from pagecast import LLM, Client, SamplingParams, cluster
from pagecast.errors import StartError
from pagecast.types import Tokens
from pagecast_scheduler.launch.events import ChildStarted

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=24, ignore_eos=True)
PLAIN = SamplingParams(temperature=1.1, seed=12, max_tokens=24, ignore_eos=True)
TEXTS = ["a", "The capital of France is", "Once upon a time, in a land far away, " * 2, "0123456789" * 4]
NUM_BLOCKS = 20
TIE = 1e-4

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with 4 heads over 2 KV heads, and a tokenizer of bytes."""
    return write_tokenizer(write_model(tmp_path_factory.mktemp("tiny")))


@cache
def judge(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def complaint(folder: Path, prompt: tuple[int, ...], output: tuple[int, ...]) -> str:
    """Empty if every token has the largest logit after what came before it, or one that ties with it."""
    logits = judge(folder)(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1:]
    behind = logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return f"tokens {torch.nonzero(behind > TIE).flatten().tolist()} are not the best" if bool((behind > TIE).any()) else ""


def sampled(llm: LLM) -> list[tuple[int, ...]]:
    """Rows that filter, rows that do not, which need no more than each rank's best token, and both in one batch."""
    mixed = [SAMPLED, PLAIN, SAMPLED, PLAIN]
    return [output.outputs[0].token_ids for params in (SAMPLED, PLAIN, mixed) for output in llm.generate(TEXTS, params)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """What one rank samples."""
    with LLM(str(checkpoint), dtype="float32", max_num_seqs=4) as llm:
        return sampled(llm)


@pytest.mark.parametrize("ranks", [2, 4], ids=["heads split", "KV heads replicated"])
def test_tokens_are_those_of_one_rank(checkpoint: Path, expected: list[tuple[int, ...]], ranks: int) -> None:
    options = {"dtype": "float32", "tensor_parallel_size": ranks, "num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "check_invariants": True}
    with LLM(str(checkpoint), **options) as llm, Client(llm.target) as client:
        prompts = [client.tokenize(text) for text in TEXTS]
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(TEXTS, GREEDY), strict=True):
                tokens = output.outputs[0].token_ids
                assert len(tokens) == GREEDY.max_tokens and complaint(checkpoint, prompt, tokens) == ""
        assert sampled(llm) == expected
        load = client.load()
        assert load.num_preemptions > 0 and load.prefix_tokens_hit > 0


@contextmanager
def supervised(folder: Path, ranks: int) -> Iterator[tuple[Client, Events]]:
    """A cluster whose processes are known by their names."""
    events = Events()
    chosen = cluster.settings(str(folder), dtype="float32", tensor_parallel_size=ranks, max_num_seqs=4)
    with cluster.PrivateCluster(chosen, cluster.Watch(events)) as private, Client(private.target) as client:
        yield client, events


def test_a_killed_rank_costs_no_token(checkpoint: Path) -> None:
    """Rank 0, at which the others met and which alone answers."""
    sampling = SamplingParams(temperature=0, max_tokens=225, ignore_eos=True)
    with supervised(checkpoint, 2) as (client, events):
        whole = client.generate(TEXTS[1], sampling).token_ids
        event = events.wait(started("worker-0"))
        assert isinstance(event, ChildStarted) and complaint(checkpoint, client.tokenize(TEXTS[1]), whole) == ""
        tokens: list[int] = []
        for news in client.stream(TEXTS[1], sampling):
            tokens += news.token_ids if isinstance(news, Tokens) else ()
            if len(tokens) >= 10 and event is not None:
                os.kill(event.pid, signal.SIGKILL)
                event = None
        assert event is None and tuple(tokens) == whole
        assert client.load().num_recoveries == 1
        for name in ("worker-0", "worker-1"):  # a group is complete or nothing
            events.wait(started(name), 2)


def test_the_real_model_over_three_ranks() -> None:
    reference = Reference()
    prompts = [reference.encode(PROMPTS[name]) for name in ("fact", "chinese", "one token")]
    with LLM(dtype="float32", tensor_parallel_size=3, max_num_seqs=8, num_blocks=64) as llm:
        outputs = llm.generate([list(prompt) for prompt in prompts], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert reference.complaint(prompt, output.outputs[0].token_ids) == ""


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    """Nine heads over two ranks; for four see the worker's own tests."""
    with pytest.raises(StartError, match="tensor_parallel_size must divide num_attention_heads, got 2 for 9"):
        LLM(dtype="float32", tensor_parallel_size=2, num_blocks=64)
