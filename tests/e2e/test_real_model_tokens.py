"""Greedy output of the real SmolLM2-135M, through gRPC, against transformers in float32 on the same file.

Every kind of prompt: alone, sixteen at once, from cached prefixes, with a pool so small that requests are preempted, and in chunks
of 32 tokens. The reference is loaded once and asked once for each different continuation.
"""

import time
from collections.abc import Iterator

import pytest
from e2e.real_model import NUM_TOKENS, PROMPTS, Reference

from pagecast import LLM, Client, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
EXACT = {"dtype": "float32", "max_num_seqs": 16}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**EXACT) as cluster:
        yield cluster


def judge(reference: Reference, llm: LLM, names: list[str], *, cache_scope: str = "", bypass: bool = False) -> list[int]:
    """Generate for these prompts at once and hold each output to the reference. Returns the cached prompt tokens of each."""
    prompts = [list(reference.encode(PROMPTS[name])) for name in names]
    outputs = llm.generate(prompts, GREEDY, cache_scope=cache_scope, bypass_prefix_cache=bypass)
    complaints = {}
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_TOKENS and output.outputs[0].finish_reason == "length"
        if complaint := reference.complaint(tuple(prompt), tokens):
            complaints[name] = complaint
    assert complaints == {}
    return [output.num_cached_tokens for output in outputs]


def test_there_are_enough_prompts_of_every_kind(reference: Reference) -> None:
    lengths = {name: len(reference.encode(text)) for name, text in PROMPTS.items()}
    assert len(lengths) >= 20 and lengths["one token"] == 1 and 1400 <= lengths["long"] <= 1700, lengths


def test_the_reference_agrees_with_its_own_generate_and_can_complain(reference: Reference) -> None:
    prompt = reference.encode(PROMPTS["fact"])
    output = reference.greedy(prompt, 16)
    assert reference.complaint(prompt, output) == ""
    spoiled = (*output[:5], (output[5] + 1) % 49152, *output[6:])
    assert reference.complaint(prompt, spoiled).startswith("token 5 is")


def test_the_server_tokenizes_as_transformers_does(reference: Reference, llm: LLM) -> None:
    with Client(llm.target) as client:
        for text in PROMPTS.values():
            assert client.tokenize(text) == reference.encode(text)
            assert client.detokenize(reference.encode(text), skip_special_tokens=False) == text
        chat = [{"role": "user", "content": "Name three colours."}]
        rendered = client.render_chat(chat)
        expected = reference.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered.text == expected
        assert rendered.token_ids == reference.encode(expected)


def test_alone_without_and_with_prefix_hits(reference: Reference, llm: LLM) -> None:
    """The second time all full blocks come from the cache. A prompt within one block has none, and is asked past the cache instead."""
    for name in PROMPTS:
        full = (len(reference.encode(PROMPTS[name])) - 1) // 16 * 16
        assert judge(reference, llm, [name], cache_scope="alone") == [0]
        assert judge(reference, llm, [name], cache_scope="alone", bypass=not full) == [full]


def test_sixteen_at_once_without_and_with_prefix_hits(reference: Reference, llm: LLM) -> None:
    names = list(PROMPTS)
    judge(reference, llm, names, cache_scope="twice")
    again = dict(zip(names, judge(reference, llm, names, cache_scope="twice")))
    for name, cached in again.items():
        length = len(reference.encode(PROMPTS[name]))
        assert cached == (length - 1) // 16 * 16, f"{name}: {cached} of {length} prompt tokens came from the cache"


@pytest.mark.parametrize("options", [
    pytest.param({"max_num_batched_tokens": 32}, id="chunks of 32"),
    # 110 blocks of 16 tokens: the long prompt with its output needs 98 of them.
    pytest.param({"num_blocks": 111}, id="tiny pool"),
])
def test_under_pressure(reference: Reference, options: dict[str, int]) -> None:
    with LLM(**EXACT, **options) as llm, Client(llm.target) as client:
        judge(reference, llm, list(PROMPTS))
        # The engine tells its counters once a second and on change.
        load = client.load()
        for _ in range(100):
            if load.num_blocks_referenced == 0 and load.num_running == 0:
                break
            time.sleep(0.1)
            load = client.load()
    if "num_blocks" in options:
        assert load.num_preemptions > 0
    assert load.num_blocks_referenced == 0
