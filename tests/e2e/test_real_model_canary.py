"""Bad input against the real model: each refused at once with the field it names, while a stream beside it goes on unharmed."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagecast import LLM, Client, SamplingParams, errors
from pagecast.requests import Prompt
from pagecast.types import Tokens

CANARY: Prompt = "Once upon a time, in a village by the sea, there lived a"
LENGTH = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

BAD: list[tuple[str, Prompt, SamplingParams, dict[str, Any], str]] = [
    ("empty text", "", SamplingParams(), {}, "prompt"),
    ("no token ids", [], SamplingParams(), {}, "prompt"),
    ("prompt too long", [5] * 3000, SamplingParams(), {}, "prompt"),
    ("output larger than the pool", "x", SamplingParams(max_tokens=2**31), {}, "max_output_tokens"),
    ("id outside the vocabulary", [1, 49152], SamplingParams(), {}, "prompt_token_ids"),
    ("largest id", [2**32 - 1], SamplingParams(), {}, "prompt_token_ids"),
    ("temperature is no number", "x", SamplingParams(temperature=math.nan), {}, "temperature"),
    ("temperature infinite", "x", SamplingParams(temperature=math.inf), {}, "temperature"),
    ("temperature negative", "x", SamplingParams(temperature=-1), {}, "temperature"),
    ("top_p zero", "x", SamplingParams(top_p=0), {}, "top_p"),
    ("top_p above one", "x", SamplingParams(top_p=1.5), {}, "top_p"),
    ("min_p is no number", "x", SamplingParams(min_p=math.nan), {}, "min_p"),
    ("stop id outside the vocabulary", "x", SamplingParams(stop_token_ids=[49152]), {}, "stop_token_ids"),
    ("stop text empty", "x", SamplingParams(stop=[""]), {}, "stop_texts"),
    ("request id too long", "x", SamplingParams(), {"request_id": "r" * 129}, "request_id"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=2048) as cluster:
        yield cluster


@pytest.mark.timeout(600)
def test_bad_input_is_refused_by_field_and_harms_no_one(llm: LLM) -> None:
    with Client(llm.target) as client:
        expected = client.generate(CANARY, LENGTH, bypass_prefix_cache=True).token_ids
        stream = client.stream(CANARY, LENGTH, bypass_prefix_cache=True)
        got: list[int] = []
        first = threading.Event()

        def read() -> None:
            for event in stream:
                if isinstance(event, Tokens):
                    got.extend(event.token_ids)
                    first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(300)
        for name, prompt, sampling, options, field in BAD:
            with pytest.raises(errors.InvalidRequest) as caught:
                client.generate(prompt, sampling, **options)
            assert any(field in violation.field for violation in caught.value.violations), f"{name}: {caught.value}"
            assert "Traceback" not in str(caught.value) and "/" not in str(caught.value), name
        with pytest.raises(errors.NotFound):
            client.generate("x", model="no-such-model")
        reader.join(300)
        assert tuple(got) == expected


@pytest.mark.timeout(600)
def test_chunks_are_whole_characters_and_join_to_the_text(llm: LLM) -> None:
    """With scripts of several bytes a character, sampled hot so that characters are cut at every place."""
    with Client(llm.target) as client:
        for seed in range(3):
            sampling = SamplingParams(temperature=1.5, seed=seed, max_tokens=48, ignore_eos=True)
            chunks = [event.text for event in client.stream("你好，世界！👨‍👩‍👧 ☀️", sampling) if isinstance(event, Tokens)]
            whole = client.generate("你好，世界！👨‍👩‍👧 ☀️", sampling)
            assert "".join(chunks) == whole.text
            assert whole.text == client.detokenize(whole.token_ids)
            for chunk in chunks:
                chunk.encode("utf-8")
