"""The HTTP gateway as OpenAI's own SDK and LangChain see it, in front of the real model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from e2e.cli_server import LIMIT_S, Served, serve
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

MESSAGES: list[Any] = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--cpu-kv-gib", "0.3", "--http-port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [only] = client.models.list().data
    assert client.models.retrieve(only.id).id == only.id
    return only.id


def test_a_chat_streams_what_it_answers(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_several_prompts_and_outputs_keep_their_order(client: openai.OpenAI, model: str) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    answer = client.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0.9, n=2, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(model=model, prompt=prompts[1], max_tokens=6, temperature=0.9, n=2, seed=7)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0.9, n=2, seed=7, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI, model: str) -> None:
    free = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0).choices[0].text
    assert "7" in free
    cut = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0, stop=["7"]).choices[0]
    assert cut.text == free[: free.index("7")] and cut.finish_reason == "stop"
    assert (cut.model_extra or {})["stop_reason"] == "7"


def test_refusals_have_the_shape_that_the_sdk_knows(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES, max_tokens=1)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1, temperature=1000)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="word " * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as image:
        part = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": [part]}], max_tokens=1)  # type: ignore[list-item,misc]
    assert "image_url" in str(image.value)
    with pytest.raises(openai.BadRequestError) as extra:
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1, extra_body={"colour": "red"})
    assert extra.value.param == "colour"


def test_langchain_invokes_and_streams(served: Served, model: str) -> None:
    chat = ChatOpenAI(base_url=f"{served.http}/v1", api_key="none", model=model, temperature=0, max_completion_tokens=8, max_retries=0)
    asked = [SystemMessage("Answer in one word."), HumanMessage("Name a colour.")]
    answer = chat.invoke(asked)
    assert isinstance(answer, AIMessage) and answer.content and answer.usage_metadata is not None
    assert "".join(str(chunk.content) for chunk in chat.stream(asked)) == answer.content


def test_tokens_and_text_go_both_ways(served: Served, model: str) -> None:
    with httpx.Client(base_url=served.http, timeout=LIMIT_S) as http:
        made = http.post("/tokenize", json={"model": model, "prompt": "Hello, 世界"}).json()
        assert made["count"] == len(made["tokens"]) > 0 and made["max_model_len"] > 0
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Hello, 世界"}
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        usage = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == chat["count"]


def test_echo_and_logprobs_stand_beside_the_text(client: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time"
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    assert "".join(logprobs.tokens) == choice.text and logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


SCORED = ["Once upon a time", "<|im_start|>user\nIt costs 世界 5€.<|im_end|>", "a"]


def test_a_prompt_is_scored_without_an_output(client: openai.OpenAI, model: str) -> None:
    """Texts and token ids, special tokens and characters of several tokens among them, streamed or not."""
    asked: dict[str, Any] = {"model": model, "echo": True, "logprobs": 2, "temperature": 0}
    whole = client.completions.create(prompt=SCORED, max_tokens=0, **asked)
    assert whole.usage is not None and whole.usage.completion_tokens == 0
    longer = client.completions.create(prompt=SCORED, max_tokens=3, **asked)
    num_tokens = 0
    for choice, text, more in zip(whole.choices, SCORED, longer.choices, strict=True):
        found, other = choice.logprobs, more.logprobs
        assert choice.text == text and choice.finish_reason == "length" and found is not None and other is not None
        assert found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset and other.tokens and other.text_offset
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert all(value is not None and value < 0 for value in found.token_logprobs[1:])
        assert all(top is not None and max(top.values()) >= value for top, value in zip(found.top_logprobs[1:], found.token_logprobs[1:]))
        count = len(found.tokens)
        num_tokens += count
        assert (found.tokens, found.token_logprobs) == (other.tokens[:count], (other.token_logprobs or [])[:count])
        assert found.text_offset == other.text_offset[:count]
        for each, whole_text in ((found, text), (other, more.text)):
            for token, offset in zip(each.tokens or [], each.text_offset or [], strict=True):
                assert "\ufffd" in token or whole_text[offset:].startswith(token), (token, offset)
    assert num_tokens == whole.usage.prompt_tokens
    assert whole.choices[1].logprobs is not None and whole.choices[1].logprobs.tokens is not None
    assert whole.choices[1].logprobs.tokens[0] == "<|im_start|>"
    ids = httpx.post(f"{client.base_url}".replace("/v1/", "/tokenize"), json={"prompt": SCORED[1]}, timeout=LIMIT_S).json()["tokens"]
    [by_ids] = client.completions.create(prompt=ids, max_tokens=0, **asked).choices
    assert (by_ids.text, by_ids.logprobs) == (SCORED[1], whole.choices[1].logprobs)
    pieces = {chunk.choices[0].index: chunk.choices[0] for chunk in client.completions.create(
        prompt=SCORED, max_tokens=0, stream=True, **asked,
    )}
    assert [pieces[i].model_dump() for i in range(len(SCORED))] == [choice.model_dump() for choice in whole.choices]


def test_a_stream_has_the_places_of_tokens_that_a_whole_answer_has(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": SCORED[1], "echo": True, "logprobs": 1, "max_tokens": 12, "stop": ["never", "e"]}
    whole = client.completions.create(seed=1, **asked).choices[0]
    assert whole.logprobs is not None
    chunks = [chunk.choices[0] for chunk in client.completions.create(seed=1, stream=True, **asked)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    offsets = [place for chunk in chunks if chunk.logprobs is not None for place in chunk.logprobs.text_offset or []]
    tokens = [token for chunk in chunks if chunk.logprobs is not None for token in chunk.logprobs.tokens or []]
    assert (tokens, offsets) == (whole.logprobs.tokens, whole.logprobs.text_offset)

def test_chat_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(one.token for one in logprobs.content).startswith(answer.choices[0].message.content or "-")
    for one in logprobs.content:
        assert one.logprob == one.top_logprobs[0].logprob  # greedy: the likeliest
        assert len(one.top_logprobs) == 3 and one.bytes is not None


def test_an_answer_in_the_form_of_a_schema(client: openai.OpenAI, model: str) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": {
            "type": "object", "required": ["name", "age"], "additionalProperties": False,
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        }},
    }
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Describe a person as JSON."}], response_format=form, max_tokens=64,
        temperature=0,
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120


def test_a_model_whose_template_knows_no_tools_says_so(client: openai.OpenAI, model: str) -> None:
    function = {"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
    tool: Any = {"type": "function", "function": function}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=MESSAGES, tools=[tool], max_tokens=8)
    assert refused.value.param == "tools"
