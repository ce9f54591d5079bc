"""What callers say becomes the API's messages, field by field; what the messages cannot hold is refused by name."""

import json
from typing import Any

import pytest

from pagecast import answers, requests, types
from pagecast.llm import listed
from pagecast.sampling import SamplingParams
from pagecast.v1 import generation_pb2 as pb


def filled(**values: Any) -> pb.GenerationSpec:
    spec = pb.GenerationSpec()
    SamplingParams(**values).fill(spec)
    spec.output.ClearField("text")
    return spec


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0, "seed": 0},
     {"sampling": {"temperature": 0, "top_k": 0, "top_p": 0.5, "min_p": 0, "seed": 0}}),
    ({"presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
     {"sampling": {"presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}}),
    ({"n": 3}, {"sampling": {"num_sequences": 3}}),
    ({"logit_bias": {7: -100.0}}, {"sampling": {"logit_bias": [pb.TokenBias(token_id=7, bias=-100)]}}),
    ({"allowed_token_ids": []}, {"sampling": {"allowed_token_ids": pb.TokenIds()}}),
    ({"allowed_token_ids": [1, 2]}, {"sampling": {"allowed_token_ids": pb.TokenIds(ids=[1, 2])}}),
    ({"bad_words": ["a"], "bad_token_sequences": [[1, 2]]},
     {"sampling": {"bad_words": ["a"], "bad_token_sequences": [pb.TokenIds(ids=[1, 2])]}}),
    ({"stop": "x", "include_stop_str_in_output": True}, {"stopping": {"stop_texts": ["x"], "include_stop_in_output": True}}),
    ({"max_tokens": 0, "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": False},
     {"stopping": {"max_output_tokens": 0, "min_output_tokens": 2, "stop_token_ids": [5], "ignore_eos": False}}),
    ({"logprobs": 0, "prompt_logprobs": 5},
     {"output": {"logprobs": pb.LogprobsOptions(), "prompt_logprobs": pb.LogprobsOptions(top_n=5)}}),
    ({"skip_special_tokens": False, "parse_reasoning": True, "parse_tool_calls": False},
     {"output": {"skip_special_tokens": False, "parse_reasoning": True, "parse_tool_calls": False}}),
    ({"json_schema": '{"a": 1}'}, {"constraint": {"json_schema": '{"a": 1}'}}),
    ({"json_schema": {"a": 1}}, {"constraint": {"json_schema": '{"a": 1}'}}),
    ({"json_object": True}, {"constraint": {"json_object": pb.JsonObject()}}),
    ({"regex": "a+"}, {"constraint": {"regex": "a+"}}),
    ({"choices": ["a", "b"]}, {"constraint": {"choices": pb.Choices(texts=["a", "b"])}}),
    ({"choices": []}, {"constraint": {"choices": pb.Choices()}}),
    ({"grammar": "start: x"}, {"constraint": {"grammar": "start: x"}}),
]  # fmt: skip
KINDS = {"sampling": pb.SamplingOptions, "stopping": pb.StoppingOptions, "output": pb.OutputOptions, "constraint": pb.Constraint}


@pytest.mark.parametrize(("values", "wanted"), CASES)
def test_each_parameter_has_its_field(values: dict[str, Any], wanted: dict[str, Any]) -> None:
    got = filled(**values)
    for name, kind in KINDS.items():
        assert getattr(got, name) == kind(**wanted.get(name, {}))


@pytest.mark.parametrize(
    ("values", "name"),
    [({"seed": -1}, "seed"), ({"n": 1.5}, "n"),
     ({"top_k": 1 << 32}, "top_k"), ({"logprobs": -1}, "logprobs"),
     ({"stop_token_ids": [-1]}, "stop_token_ids"),
     ({"logit_bias": {-3: 1.0}}, "logit_bias"), ({"allowed_token_ids": [1 << 32]}, "allowed_token_ids"),
     ({"bad_words": "word"}, "bad_words"), ({"choices": "word"}, "choices"),
     ({"regex": "a", "json_object": True}, "regex and json_object")],
)  # fmt: skip
def test_what_no_message_holds_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        filled(**values)


@pytest.mark.parametrize("name", ["truncate", "priority", "slow_consumer", "tool_choice", "max_tokens_per_event", "credit_tokens"])
def test_an_option_that_no_message_holds_is_refused_by_name(name: str) -> None:
    wrong: Any = {name: "middle"}
    with pytest.raises(ValueError, match=f"^{name} must be "):
        requests.generation_spec([types.ChatMessage("user", "hi")], None, wrong)
        requests.delivery(wrong)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [(None, "not NoneType"), (5, "not int"), (b"text", "not bytes"), ({"role": "user", "content": "hi"}, "not dict"),
     (iter(["text"]), "not list_iterator"), (["One", "Two"], "not several texts"), ([1.5], "made of messages, not of float")],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_in_words(prompt: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        requests.generation_spec(prompt, None, {})


def test_several_prompts_that_are_none_are_refused_in_words() -> None:
    for wrong in (None, 5, iter(["text"])):
        asked: Any = wrong
        with pytest.raises(TypeError, match="a prompt is text, token ids or a conversation, not "):
            requests.generation_spec(listed(asked)[0], None, {})


def test_specs_of_many_prompts_are_those_of_each() -> None:
    """Whatever sampling parameters come one after the other, the same object or an equal one."""
    shared = SamplingParams(temperature=0.5, stop=["a"], max_tokens=4)
    samplings = [None, shared, shared, SamplingParams(temperature=0.5, stop=["a"], max_tokens=4), None, SamplingParams(max_tokens=4)]
    prompts: list[Any] = ["one", [1, 2], [types.ChatMessage("user", "hi")], "two", [3], "three"]
    options: requests.RequestOptions = {"cache_scope": "here", "priority": "batch", "labels": {"a": "b"}}
    made = requests.Specs(options)
    specs = [made.of(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    assert specs == [requests.generation_spec(prompt, sampling, options) for prompt, sampling in zip(prompts, samplings, strict=True)]
    assert specs[1].prompt_token_ids.ids == [1, 2] and specs[2].chat.messages and not specs[3].HasField("chat")


@pytest.mark.parametrize(
    ("good", "bad"),
    [({"max_tokens": 4}, {"max_tokens": 4.0}), ({"n": 1}, {"n": True}), ({"stop_token_ids": [1]}, {"stop_token_ids": [1.0]})],
)
def test_what_is_equal_to_something_good_is_refused_all_the_same(good: Any, bad: Any) -> None:
    made = requests.Specs({})
    made.of("a", SamplingParams(**good))
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        made.of("a", SamplingParams(**bad))


def test_options_with_names_for_values() -> None:
    chat = [types.ChatMessage("user", "hi")]
    spec = requests.generation_spec(chat, None, {"truncate": "start", "priority": "batch", "tool_choice": "auto"})
    assert (spec.truncate, spec.scheduling.priority) == (pb.TRUNCATE_START, pb.PRIORITY_BATCH)
    assert spec.chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_AUTO
    delivery = requests.delivery({"slow_consumer": "abort", "credit_tokens": 7})
    assert (delivery.slow_consumer, delivery.credit_tokens) == (pb.SLOW_CONSUMER_ABORT, 7)


def test_a_conversation_with_tools_and_its_answers() -> None:
    call = types.ToolCall("c1", "f", '{"x": 1}')
    chat = [
        {"role": "user", "content": "hi"},
        types.ChatMessage("assistant", tool_calls=(call,), reasoning_text="hm"),
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
    ]
    tool = types.Tool("f", "adds", {"type": "object"})
    options: requests.RequestOptions = {
        "tools": [tool], "tool_name": "f", "template_kwargs": {"thinking": False}, "add_generation_prompt": False,
    }  # fmt: skip
    spec = requests.generation_spec(chat, None, options)
    assert [m.role for m in spec.chat.messages] == ["user", "assistant", "tool"] and spec.chat.messages[2].tool_call_id == "c1"
    assert spec.chat.messages[1].tool_calls[0].arguments == '{"x": 1}' and spec.chat.messages[1].reasoning_text == "hm"
    assert json.loads(spec.chat.tools[0].parameters_json_schema) == {"type": "object"}
    assert spec.chat.tool_choice == pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name="f")
    assert dict(spec.chat.template_kwargs) == {"thinking": False} and spec.chat.HasField("add_generation_prompt")
    with pytest.raises(ValueError, match="tools goes with a conversation"):
        requests.generation_spec("text", None, {"tools": [tool]})


@pytest.mark.parametrize("message_of", [requests.count_tokens, requests.render_chat])
def test_what_only_a_tokenizer_is_asked_takes_no_other_options(message_of: Any) -> None:
    chat = [types.ChatMessage("user", "x")]
    message = message_of(chat, {"model": "m", "timeout": 1.0, "add_generation_prompt": False})
    assert message.model == "m" and message.chat.HasField("add_generation_prompt")
    for name in ("tool_choise", "priority"):
        with pytest.raises(TypeError, match=f"no request option '{name}'; there are add_generation_prompt, model, "):
            message_of(chat, {name: "x"})
    with pytest.raises(ValueError, match="template_kwargs goes with a conversation"):
        requests.count_tokens("text", {"template_kwargs": {}})


def test_answers_carry_log_probabilities_reasoning_and_calls() -> None:
    best = pb.AlternativeToken(token_id=8, logprob=-0.5, token_bytes=b"y")
    record = pb.TokenLogprob(token_id=7, logprob=-1, token_bytes=b"x", top=[best])
    sequence = pb.GeneratedSequence(
        token_ids=[7], logprobs=[record], reasoning_text="hm", tool_calls=[pb.ToolCall(id="c", name="f", arguments="{}")],
        reason=pb.FINISH_REASON_CONSTRAINT_COMPLETE, stop_token_id=2,
    )
    message = pb.GenerateResponse(
        sequences=[sequence, sequence], prompt_logprobs=[pb.TokenLogprob(token_id=5), record],
        effective=pb.EffectiveParameters(num_sequences=2, logprobs_top_n=0, tool_call_format="hermes"),
    )
    got = answers.generation(message)
    expected = types.TokenLogprob(7, -1.0, (types.Alternative(8, -0.5, b"y"),), b"x")
    assert len(got.sequences) == 2 and got.sequences[1].logprobs == (expected,) and got.sequences[0].reason == "constraint_complete"
    assert got.prompt_logprobs == (types.TokenLogprob(5, None, (), b""), expected)
    assert got.sequences[0].tool_calls == (types.ToolCall("c", "f", "{}"),) and got.sequences[0].reasoning_text == "hm"
    used = got.effective
    assert (used.n, used.logprobs, used.prompt_logprobs, used.tool_call_format) == (2, 0, None, "hermes")
    event = answers.event(pb.StreamEvent(seq=2, prompt=pb.PromptEvent(first_position=3, logprobs=[record])))
    assert event == types.PromptLogprobs(2, 3, (expected,))
    piece = pb.ToolCallDelta(index=1, id="c", name="f", arguments="{")
    tokens = answers.event(pb.StreamEvent(seq=3, tokens=pb.TokensEvent(reasoning_text="a", tool_calls=[piece])))
    assert isinstance(tokens, types.Tokens) and tokens.reasoning_text == "a"
    assert tokens.tool_calls == (types.ToolCallDelta(1, "c", "f", "{"),)
