"""From OpenAI's request bodies to the gRPC API's spec. Checks only what the spec cannot hold; the front end checks the rest."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.gateway import schema
from pagecast_scheduler.gateway.errors import HALF_A_PAIR, Faults

MAX_PROMPTS = 128
"""Prompts of one completion request; each becomes a request of its own."""

DEFAULT_OUTPUT_TOKENS = 16
"""Of a completion whose caller names no limit, as far as there is room. A chat's is all the room."""

MAX_KWARGS_DEPTH = 24
"""Of chat_template_kwargs: each level takes three of a message, and protobuf reads a hundred."""

_MEDIA = ("image_url", "input_audio", "audio", "video_url", "file", "image", "refusal")


def specs_of(body: schema.Generation, found: Faults) -> list[pb.GenerationSpec]:
    """One spec for each prompt. What is wrong is added to `found`, and left out."""
    if isinstance(body, schema.CompletionRequest):
        return _completion_specs(body, found)
    assert isinstance(body, schema.ChatCompletionRequest)
    return [_chat_spec(body, found)]


def names_of(body: schema.Generation) -> dict[str, str]:
    """Fields that a body calls otherwise than errors do by themselves."""
    names = {}
    for at, token in enumerate(body.logit_bias or ()):  # a list of pairs there, an object here
        names[f"logit_bias[{at}].token_id"] = names[f"logit_bias[{at}].bias"] = f"logit_bias.{token}"
    if isinstance(body, schema.ChatCompletionRequest):
        names["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None and body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if body.response_format is None:
            names["response_format"] = "tool_choice"
    return names


def _completion_specs(body: schema.CompletionRequest, found: Faults) -> list[pb.GenerationSpec]:
    if body.best_of is not None and body.best_of != (body.n or 1):
        found.add("best_of must equal n: every output that is generated is returned", "best_of")
    if body.is_scoring and body.min_tokens:
        found.add(f"min_tokens must be at most max_tokens 0, not {body.min_tokens}", "min_tokens")
    prompts, base = _prompts(body, found), _spec(body, found)
    if body.has_own_limit or not found:  # front ends that are asked for more faults are to find none in what nobody said
        _limit(base, _output_tokens(body))
    specs = []
    for prompt in prompts:
        spec = pb.GenerationSpec()
        spec.CopyFrom(base)
        if isinstance(prompt, str):
            spec.prompt_text = prompt
        else:
            spec.prompt_token_ids.ids.extend(prompt)
            spec.prompt_token_ids.SetInParent()
        if body.logprobs is not None:
            spec.output.logprobs.top_n = body.logprobs
            if body.echo:
                spec.output.prompt_logprobs.top_n = body.logprobs
        specs.append(spec)
    return specs


def _chat_spec(body: schema.ChatCompletionRequest, found: Faults) -> pb.GenerationSpec:
    spec = _spec(body, found)
    if not body.messages:
        found.add("messages must hold at least one message", "messages")
        spec.chat.SetInParent()
    fill_chat(spec.chat, body.messages, found)
    if body.add_generation_prompt is not None:
        spec.chat.add_generation_prompt = body.add_generation_prompt
    if body.chat_template_kwargs:
        _template_kwargs(spec.chat, body.chat_template_kwargs, found)
    if body.reasoning_effort is not None:  # for the templates that read it
        spec.chat.template_kwargs.update({"reasoning_effort": body.reasoning_effort})
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        found.add("max_tokens and max_completion_tokens name the same limit; give one", "max_completion_tokens")
    _limit(spec, body.max_completion_tokens if body.max_tokens is None else body.max_tokens)
    if body.logprobs:
        spec.output.logprobs.top_n = body.top_logprobs or 0
        spec.output.logprobs.SetInParent()
    elif body.top_logprobs:
        found.add("top_logprobs needs logprobs to be true", "top_logprobs")
    _tools(spec.chat, body)
    _response_format(spec, body.response_format, found)
    return spec


def _template_kwargs(chat: pb.ChatPrompt, given: dict[str, Any], found: Faults) -> None:
    """Values for the template, as far as a message can carry them."""
    if _depth(given) > MAX_KWARGS_DEPTH:
        found.add(f"chat_template_kwargs must be nested at most {MAX_KWARGS_DEPTH} deep", "chat_template_kwargs")
        return
    try:
        chat.template_kwargs.update(given)
    except UnicodeEncodeError:
        chat.ClearField("template_kwargs")
        found.add(f"chat_template_kwargs {HALF_A_PAIR}", "chat_template_kwargs")


def _depth(value: Any) -> int:
    """How many objects and lists are within each other."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def fill_chat(chat: pb.ChatPrompt, messages: Sequence[schema.Message], found: Faults) -> None:
    """A conversation as the API's message. Content that is not text is a fault."""
    for number, message in enumerate(messages):
        made = chat.messages.add(role="system" if message.role == "developer" else message.role, content=_text(message, number, found))
        made.name, made.tool_call_id = message.name or "", message.tool_call_id or ""
        made.reasoning_text = message.reasoning_content or message.reasoning or ""
        for call in message.tool_calls or ():
            made.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)


def _text(message: schema.Message, number: int, found: Faults) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for i, part in enumerate(message.content):
        if isinstance(part, schema.TextPart):
            texts.append(part.text)
            continue
        kind = part.get("type")
        where = f"messages[{number}].content[{i}]"
        if kind == "text":
            found.add(f"{where} must have type and text alone; a text {HALF_A_PAIR}", where)
            continue
        found.add(f"{where}: {kind if kind in _MEDIA else 'this kind of content'} is not supported; only text is", where)
    return "".join(texts)


def _spec(body: schema.Generation, found: Faults) -> pb.GenerationSpec:
    """What both endpoints have in common."""
    spec = pb.GenerationSpec(model=body.model)
    sampling, stopping = spec.sampling, spec.stopping
    _copy(body, sampling, ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"))
    if body.n is not None:
        sampling.num_sequences = body.n
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.seed is not None:
        sampling.seed = body.seed % (1 << 64)  # negative seeds are seeds too
    sampling.logit_bias.extend(_biases(body.logit_bias or {}, found))
    if body.allowed_token_ids is not None:
        sampling.allowed_token_ids.ids.extend(body.allowed_token_ids)
        sampling.allowed_token_ids.SetInParent()
    sampling.bad_words.extend(body.bad_words or ())
    stopping.stop_texts.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    stopping.stop_token_ids.extend(body.stop_token_ids or ())
    if body.min_tokens is not None:
        stopping.min_output_tokens = body.min_tokens
    if body.ignore_eos is not None:
        stopping.ignore_eos = body.ignore_eos
    if body.include_stop_str_in_output is not None:
        stopping.include_stop_in_output = body.include_stop_str_in_output
    if body.skip_special_tokens is not None:
        spec.output.skip_special_tokens = body.skip_special_tokens
    if body.time_budget_s is not None:
        stopping.time_budget.CopyFrom(_duration(body.time_budget_s))
    if body.priority is not None:
        spec.scheduling.priority = pb.Priority.Value(f"PRIORITY_{body.priority.upper()}")
    spec.cache.cache_scope = body.cache_scope or ""
    return spec


def _copy(body: schema.Generation, sampling: pb.SamplingOptions, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)


def _output_tokens(body: schema.CompletionRequest) -> int | None:
    """The limit to ask for: one token for scoring, which is then left out; without the caller's word, what OpenAI's is."""
    if body.is_scoring:
        return 1
    return body.max_tokens if body.has_own_limit else max(DEFAULT_OUTPUT_TOKENS, body.min_tokens or 0)


def _prompts(body: schema.CompletionRequest, found: Faults) -> list[Any]:
    """The prompts of a completion request, one entry each; at least one, and no more than are allowed."""
    prompts: list[Any] = list(body.prompt) if body.has_numbers else [body.prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        found.add(f"prompt must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}", "prompt")
    return prompts[:MAX_PROMPTS] or ["-"]


def _biases(given: dict[str, float], found: Faults) -> Iterator[pb.TokenBias]:
    if not all(token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 1 << 32 for token in given):
        found.add("the keys of logit_bias must be token ids", "logit_bias")
        return
    for token, bias in given.items():
        yield pb.TokenBias(token_id=int(token), bias=bias)


def _limit(spec: pb.GenerationSpec, max_tokens: int | None) -> None:
    if max_tokens is not None:
        spec.stopping.max_output_tokens = max_tokens


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(min(seconds, 1e9) * 1e9))
    return made


def _tools(chat: pb.ChatPrompt, body: schema.ChatCompletionRequest) -> None:
    for tool in body.tools or ():
        function = tool.function
        parameters = "" if function.parameters is None else json.dumps(function.parameters)
        chat.tools.add(name=function.name, description=function.description or "", parameters_json_schema=parameters)
    choice = body.tool_choice
    if choice is None:
        return
    if isinstance(choice, schema.NamedTool):
        chat.tool_choice.mode, chat.tool_choice.name = pb.TOOL_CHOICE_MODE_REQUIRED, choice.function.name
    else:
        chat.tool_choice.mode = pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.upper()}")


def _response_format(spec: pb.GenerationSpec, wanted: schema.ResponseFormat | None, found: Faults) -> None:
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object":
        spec.constraint.json_object.SetInParent()
    elif wanted.json_schema is None:
        found.add("response_format.json_schema must be given with type json_schema", "response_format.json_schema")
    else:
        spec.constraint.json_schema = json.dumps(wanted.json_schema.schema_)
