"""The HTTP gateway's completions at the edges: no room for the limit that nobody gave, prompts only scored, several that are wrong."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2e.cli_server import LIMIT_S, Served, serve

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.gateway import answers

LENGTH = 64


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--executor", "oracle", "--http-port", "0", "--max-model-len", str(LENGTH), "--num-blocks", "64") as cluster:
        yield cluster


def record(token_id: int, token_bytes: bytes, *top: tuple[int, bytes, float]) -> pb.TokenLogprob:
    best = [pb.AlternativeToken(token_id=i, token_bytes=given, logprob=value) for i, given, value in top]
    return pb.TokenLogprob(token_id=token_id, token_bytes=token_bytes, logprob=-1.0, top=best)


@pytest.mark.parametrize(("text", "records", "tokens", "offsets"), [
    ("<s>a<e>", [(1, b""), (5, b"a"), (2, b"")], ["<s>", "a", "<e>"], [0, 3, 4]),
    ("a", [(1, b""), (5, b"a")], ["", "a"], [0, 0]),  # put before the text by the tokenizer
    ("a b", [(5, b" a"), (6, b" b")], [" a", " b"], [0, 1]),
    (" a b", [(5, b" a"), (6, b" b")], [" a", " b"], [0, 2]),
    ("\u4e16!", [(5, b"\xe4\xb8"), (6, b"\x96"), (7, b"!")], ["\ufffd", "\ufffd", "!"], [0, 0, 1]),
])
def test_tokens_are_told_where_they_stand(text: str, records: list[tuple[int, bytes]], tokens: list[str], offsets: list[int]) -> None:
    echo = answers.Echo(text, [record(*one) for one in records], {1: "<s>", 2: "<e>"})
    found = answers.TextLogprobs(echo).of_prompt()
    assert found is not None and (found["tokens"], found["text_offset"]) == (tokens, offsets)


def test_of_tokens_that_show_the_same_the_likeliest_is_told() -> None:
    echo = answers.Echo("a<e>", [record(5, b"a"), record(2, b"", (2, b"", -0.5), (3, b"", -2.0), (4, b"", -3.0))], {2: "<e>"})
    found = answers.TextLogprobs(echo).of_prompt()
    assert found is not None and found["top_logprobs"] == [None, {"<e>": -0.5, "": -2.0}]


def complete(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.http}/v1/completions", json={"ignore_eos": True, **body}, timeout=LIMIT_S)


def chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    text = complete(served, stream=True, **body).text
    assert text.endswith("data: [DONE]\n\n"), text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(("length", "rest", "tokens"), [
    (40, {}, 16), (48, {}, 16), (49, {}, 15), (63, {}, 1), (40, {"min_tokens": 20}, 20), (63, {"min_tokens": 1}, 1), (62, {"n": 2}, 4),
    (40, {"max_tokens": None}, 24),
])  # fmt: skip
def test_a_limit_that_nobody_gave_is_cut_to_the_room(served: Served, length: int, rest: dict[str, Any], tokens: int) -> None:
    whole = complete(served, prompt=[7] * length, **rest)
    assert whole.status_code == 200, whole.text
    assert whole.json()["usage"]["completion_tokens"] == tokens
    last = chunks(served, prompt=[7] * length, stream_options={"include_usage": True}, **rest)[-1]
    assert last["usage"]["completion_tokens"] == tokens


def test_text_leaves_the_room_that_its_tokens_do(served: Served) -> None:
    asked = httpx.post(f"{served.http}/tokenize", json={"prompt": "word " * 12}, timeout=LIMIT_S).json()
    assert LENGTH - 16 < asked["count"] < LENGTH
    answer = complete(served, prompt=["word " * 12, "x"]).json()
    assert answer["usage"]["completion_tokens"] == LENGTH - asked["count"] + 16


@pytest.mark.parametrize(("body", "param", "said"), [
    ({"prompt": [7] * LENGTH}, "prompt", "prompt: the prompt must be at most 63 tokens, not 64"),
    ({"prompt": [7] * 50, "max_tokens": 16}, "max_tokens", "max_tokens: prompt of 50 tokens and 16 output tokens exceed max_model_len 64"),
    ({"prompt": [7] * 50, "min_tokens": 20}, "min_tokens", "min_tokens must be at most"),
    ({"prompt": [7], "max_tokens": 0}, "max_tokens", "max_tokens must be 1 to 63, not 0"),
    ({"prompt": [7], "max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "min_tokens must be at most max_tokens 0, not 1"),
    ({"prompt": [7] * LENGTH, "max_tokens": 0, "echo": True}, "prompt", "prompt: the prompt must be at most 63 tokens, not 64"),
])
def test_what_does_not_fit_is_refused_under_the_name_of_what_was_given(
    served: Served, body: dict[str, Any], param: str, said: str
) -> None:
    for stream in (False, True):
        reply = complete(served, stream=stream, **body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and said in error["message"], reply.text


def test_a_model_shorter_than_the_usual_limit_answers_too() -> None:
    with serve("--executor", "oracle", "--http-port", "0", "--max-model-len", "12", "--num-blocks", "16") as short:
        assert complete(short, prompt=[7] * 4).json()["usage"]["completion_tokens"] == 8
        assert complete(short, prompt=[7] * 4, colour=1).json()["error"]["message"] == "colour: unknown field"
        full = complete(short, prompt=[7] * 12).json()["error"]
        assert full["param"] == "prompt" and full["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("prompt", "said", "more"), [
    (["x", "", "y", ""], ["prompt[1] must not be empty", "prompt[3] must not be empty"], {}),
    ([""], ["prompt[0] must not be empty"], {}),
    (["x", 3, "", None], ["prompt[1]: Input should be a valid string", "prompt[3]: Input should be", "prompt[2] must not be empty"], {}),
    ([5, "x", -1, 6, 1 << 31], ["prompt[1]: Input should be", "prompt[2]: Input should be", "prompt[4] must be below the vocabulary"], {}),
    ([5, 1 << 31, 6, 1 << 30], ["prompt[1] must be below the vocabulary size", "prompt[3] must be below the vocabulary size"], {}),
    ([1 << 31] * 20, ["prompt[0] must be", "prompt[7] must be below", " (12 more are not below it)"], {}),
    ([[5], [5, 1 << 31], [], [1 << 31, 6]], ["prompt[1][1] must be below", "prompt[2] must not be", "prompt[3][0] must be below"], {}),
    ([[5], [6, -1, "x"], "y", []], ["prompt[1][1]: Input", "prompt[1][2]: Input", "prompt[2]: Input", "prompt[3] must not be"], {}),
    ([[7] * 64, [7], [7] * 70], ["prompt[0]: the prompt must be at most 63", "prompt[2]: the prompt must be at most 63"], {}),
    ([[7] * 60, [7] * 61, [7]], ["prompt[0]: max_tokens: prompt of 60 tokens", "prompt[1]: max_tokens: prompt of 61"], {"max_tokens": 5}),
    ([[7], [8]], ["logprobs must be 0 to 20, not 999"], {"max_tokens": 0, "echo": True, "logprobs": 999}),
    ([7], ["logprobs must be 0 to 20, not 999"], {"echo": True, "logprobs": 999}),
    (["x", ""], ["prompt[1] must not be empty", "temperature must be 0 to 100"], {"temperature": 1000}),
    (["x"] * 127 + ["", "y"], ["prompt must hold 1 to 128 prompts, not 129", "prompt[127] must not be empty"], {}),
    ({}, ["prompt: Input should be a text, several texts, the token ids of one prompt, or of several"], {}),
])
def test_every_prompt_that_is_wrong_is_named_by_its_number(served: Served, prompt: Any, said: list[str], more: dict[str, Any]) -> None:
    for stream in (False, True):
        reply = complete(served, prompt=prompt, stream=stream, **more)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["type"] == "invalid_request_error"
        for words in said:
            assert error["message"].count(words) == 1, error["message"]
        assert len(error["message"].split("; ")) == (8 if len(prompt) == 20 else len(said)), error["message"]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": [" "], "return_token_ids": True}])
def test_a_prompt_alone_is_repeated_and_nothing_else(served: Served, more: dict[str, Any]) -> None:
    whole = complete(served, prompt=["one two", "hi"], max_tokens=0, echo=True, **more).json()
    count = 2 * more.get("n", 1)
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(i, "one two" if 2 * i < count else "hi") for i in range(count)]
    for one in whole["choices"]:
        assert (one["finish_reason"], one["stop_reason"], one["logprobs"], one.get("token_ids", [])) == ("length", None, None, [])
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] == 9
    *told, last = chunks(served, prompt=["one two", "hi"], max_tokens=0, echo=True, stream_options={"include_usage": True}, **more)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    found = sorted((one["choices"][0] for one in told), key=lambda choice: choice["index"])
    keys = ("index", "text", "finish_reason", "stop_reason", "logprobs")
    assert [{key: one[key] for key in keys} for one in found] == [{key: one[key] for key in keys} for one in whole["choices"]]
