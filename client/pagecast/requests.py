"""Turns what a caller says into the API's request messages. Checks only what the messages cannot hold; the server the rest."""

import json
import math
from collections.abc import Mapping, Sequence, Set
from functools import cache
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, Literal, TypedDict, cast

from google.protobuf.duration_pb2 import Duration

from pagecast.sampling import SamplingParams, set_count
from pagecast.types import CacheEvents, ChatMessage, Tool
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import runtime_pb2, tokenizer_pb2

Chat = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = str | Sequence[int] | Chat
"""Text; token ids; or a conversation, as ChatMessage values or mappings with their fields."""

ToolChoice = Literal["auto", "none", "required"]

Priority = Literal["batch", "normal", "interactive"]
Truncate = Literal["none", "start", "end"]
SlowConsumer = Literal["pause", "abort"]


MOST_SECONDS = 366 * 24 * 3600.0


class RequestOptions(TypedDict, total=False):
    """What may be said about one request besides prompt and sampling. Times in seconds.

    timeout: the call's deadline; the server stops the request when it passes. time_budget: end well, with what there is, after
    this time. max_queue_time: fail rather than wait longer. progress_interval: a Progress event after so long a silence.

    For streams: resume: go on elsewhere when the server is lost (on unless said otherwise); detach_grace: the request goes on for so
    long when the connection breaks, for a resume to find; flush_interval: let output gather; max_tokens_per_event: cut it up. attach: join
    a live request of this caller with the same request_id and the same wishes. slow_consumer: what happens when credit_tokens tokens are
    unread.

    labels: notes for the server's logs and operators. truncate: drop this end of a prompt that is too long. adapter: of the model.

    For conversations: tools that the model may call; tool_choice, or tool_name for the one tool to call; template_kwargs: values that the
    model's template reads, such as {"enable_thinking": False}; add_generation_prompt: whether the assistant's turn is begun.
    """

    model: str
    request_id: str
    timeout: float
    time_budget: float
    max_queue_time: float
    progress_interval: float
    resume: bool
    detach_grace: float
    flush_interval: float
    max_tokens_per_event: int
    attach: bool
    slow_consumer: SlowConsumer
    credit_tokens: int
    labels: Mapping[str, str]
    truncate: Truncate
    adapter: str
    priority: Priority
    cache_scope: str
    bypass_prefix_cache: bool
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    tool_name: str
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool


_VALUES = attrgetter(*SamplingParams.__dataclass_fields__)
_PLAIN = frozenset((int, float, str))
_DEFAULT = SamplingParams()


def _alike(one: SamplingParams, other: SamplingParams) -> bool:
    """Whether both say the same in the same way. 4 and 4.0 are equal, but only one of them is a count; lists are compared as objects."""
    if one is other:
        return True
    return all(a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b) for a, b in zip(_VALUES(one), _VALUES(other), strict=True))


class Specs:
    """Makes specs of requests with the same options. What sampling parameters say is written once for prompts in a row that share them."""

    def __init__(self, options: RequestOptions) -> None:
        """Raises TypeError for an option that there is not."""
        _check_names(options, RequestOptions.__annotations__.keys())
        self._options = options
        self._sampling: SamplingParams | None = None
        self._common = pb.GenerationSpec()

    def _begin(self, sampling: SamplingParams) -> None:
        options = self._options
        spec = pb.GenerationSpec(model=options.get("model", ""), request_id=options.get("request_id", ""))
        if options.get("attach"):
            spec.attach = True
        spec.adapter = options.get("adapter", "")
        spec.labels.update(options.get("labels", {}))
        if "truncate" in options:
            spec.truncate = _value("truncate", pb.Truncate, options["truncate"])
        sampling.fill(spec)
        spec.cache.cache_scope = options.get("cache_scope", "")
        if "bypass_prefix_cache" in options:
            spec.cache.bypass_prefix_cache = options["bypass_prefix_cache"]
        if "priority" in options:
            spec.scheduling.priority = _value("priority", pb.Priority, options["priority"])
        if "max_queue_time" in options:
            spec.scheduling.max_queue_time.CopyFrom(duration("max_queue_time", options["max_queue_time"]))
        if "time_budget" in options:
            spec.stopping.time_budget.CopyFrom(duration("time_budget", options["time_budget"]))
        self._common, self._sampling = spec, sampling

    def of(self, prompt: Prompt, sampling: SamplingParams | None) -> pb.GenerationSpec:
        """The spec of one request. Raises ValueError or TypeError, naming the argument, for values that it cannot express."""
        sampling = sampling or _DEFAULT
        if self._sampling is None or not _alike(sampling, self._sampling):
            self._begin(sampling)
        spec = pb.GenerationSpec()
        spec.CopyFrom(self._common)
        _set_prompt(spec, prompt)
        if spec.WhichOneof("input") == "chat":
            fill_chat(spec.chat, self._options)
        else:
            _check_no_chat(self._options)
        return spec


def generation_spec(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerationSpec:
    """The spec of one request. Raises ValueError or TypeError, naming the argument, for values that it cannot express."""
    return Specs(options).of(prompt, sampling)


def delivery(options: RequestOptions) -> pb.DeliveryOptions:
    """How a stream is to be delivered. Raises ValueError, naming the option."""
    message = pb.DeliveryOptions()
    if "progress_interval" in options:
        message.progress_interval.CopyFrom(duration("progress_interval", options["progress_interval"]))
    if "flush_interval" in options:
        message.flush_interval.CopyFrom(duration("flush_interval", options["flush_interval"]))
    for name in ("max_tokens_per_event", "credit_tokens"):
        set_count(name, message, name, options.get(name))  # type: ignore[arg-type]
    if "slow_consumer" in options:
        message.slow_consumer = _value("slow_consumer", pb.SlowConsumer, options["slow_consumer"])
    if "detach_grace" in options:
        message.on_disconnect = pb.ON_DISCONNECT_DETACH
        message.detach_grace.CopyFrom(duration("detach_grace", options["detach_grace"]))
    return message


def generate(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """A request that is answered whole. Raises as generation_spec does."""
    return pb.GenerateRequest(spec=generation_spec(prompt, sampling, options))


def generate_stream(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerateStreamRequest:
    """A request that is answered event by event. Raises as generation_spec and delivery do."""
    return pb.GenerateStreamRequest(spec=generation_spec(prompt, sampling, options), delivery=delivery(options))


def watch_load(min_interval: float) -> runtime_pb2.WatchLoadRequest:
    """How often the load is told at most."""
    return runtime_pb2.WatchLoadRequest(min_interval=duration("min_interval", min_interval))


def watch_cache_events(after: CacheEvents | None, include_token_ids: bool) -> runtime_pb2.WatchCacheEventsRequest:
    """What to tell of the prefix cache, and from where on."""
    request = runtime_pb2.WatchCacheEventsRequest(include_token_ids=include_token_ids)
    if after is not None:
        request.resume_after.instance_id, request.resume_after.sequence = after.instance_id, after.sequence
    return request


_CHAT_OPTIONS = {"tools", "tool_choice", "tool_name", "template_kwargs", "add_generation_prompt"}
_TOKENIZER_OPTIONS = _CHAT_OPTIONS | {"model", "timeout"}


def _check_names(options: RequestOptions, known: Set[str]) -> None:
    """Raises TypeError for an option that the call does not take."""
    unknown = options.keys() - known
    if unknown:
        raise TypeError(f"no request option {sorted(unknown)[0]!r}; there are {', '.join(sorted(known))}")


def _check_no_chat(options: RequestOptions) -> None:
    """Raises ValueError for an option of conversations beside another prompt."""
    if _CHAT_OPTIONS & options.keys():
        raise ValueError(f"{sorted(_CHAT_OPTIONS & options.keys())[0]} goes with a conversation, not with text or token ids")


def chat_prompt(messages: Chat) -> pb.ChatPrompt:
    """A conversation as the API's message."""
    for message in messages:
        if not isinstance(message, ChatMessage | Mapping):
            raise TypeError(f"a conversation is made of messages, not of {type(message).__name__}")
    values = [m if isinstance(m, ChatMessage) else ChatMessage(**{**m, "content": m.get("content") or ""}) for m in messages]
    return pb.ChatPrompt(
        messages=[
            pb.ChatMessage(
                role=m.role, content=m.content, tool_call_id=m.tool_call_id, name=m.name, reasoning_text=m.reasoning_text,
                tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in m.tool_calls],
            )
            for m in values
        ]
    )


def tokenize(text: str, add_special_tokens: bool, model: str) -> tokenizer_pb2.TokenizeRequest:
    """A text whose token ids are wanted."""
    return tokenizer_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool, model: str) -> tokenizer_pb2.DetokenizeRequest:
    """Token ids whose text is wanted."""
    return tokenizer_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def render_chat(messages: Chat, options: RequestOptions) -> tokenizer_pb2.RenderChatRequest:
    """A conversation that is to be put into the model's template. Raises ValueError or TypeError, naming the argument."""
    _check_names(options, _TOKENIZER_OPTIONS)
    request = tokenizer_pb2.RenderChatRequest(model=options.get("model", ""), chat=chat_prompt(messages))
    fill_chat(request.chat, options)
    return request


def count_tokens(prompt: str | Chat, options: RequestOptions) -> tokenizer_pb2.CountTokensRequest:
    """What is to be counted. Raises ValueError or TypeError, naming the argument."""
    _check_names(options, _TOKENIZER_OPTIONS)
    request = tokenizer_pb2.CountTokensRequest(model=options.get("model", ""))
    if isinstance(prompt, str):
        _check_no_chat(options)
        request.text = prompt
    else:
        request.chat.CopyFrom(chat_prompt(prompt))
        fill_chat(request.chat, options)
    return request


def fill_chat(chat: pb.ChatPrompt, options: RequestOptions) -> None:
    """Write what the options say of a conversation."""
    for tool in options.get("tools", ()):
        schema = "" if tool.parameters is None else json.dumps(tool.parameters)
        chat.tools.add(name=tool.name, description=tool.description, parameters_json_schema=schema)
    name = options.get("tool_name", "")
    if name or "tool_choice" in options:
        mode = _value("tool_choice", pb.ToolChoiceMode, options.get("tool_choice", "required"))
        chat.tool_choice.CopyFrom(pb.ToolChoice(mode=mode, name=name))
    if "template_kwargs" in options:
        chat.template_kwargs.update(options["template_kwargs"])
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options["add_generation_prompt"]


def _value(option: str, enum: Any, name: str) -> Any:
    """The number of an enumeration's value, "start" for TRUNCATE_START. Raises ValueError for a name that it does not have."""
    known = _names(enum)
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, not {name!r}")
    return known[name]


@cache
def _names(enum: Any) -> dict[str, int]:
    """The numbers of an enumeration's values by such names."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return {key.removeprefix(prefix).lower(): number for key, number in enum.items() if number}


def duration(name: str, seconds: float) -> Duration:
    """Seconds as a protobuf Duration. Raises ValueError, naming the argument, for what is no number that it holds."""
    try:
        nanos = round(seconds * 1e9)
        return Duration(seconds=int(nanos / 1_000_000_000), nanos=nanos - int(nanos / 1_000_000_000) * 1_000_000_000)
    except (ValueError, OverflowError, TypeError):
        raise ValueError(f"{name} must be a number of seconds, not {seconds!r}") from None


def timeout(given: float | None) -> float | None:
    """The deadline of a call, None for none. gRPC takes a time that is too far away for one that has passed: a year is as good.

    Raises ValueError for what is no number."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, Real) or math.isnan(given):
        raise ValueError(f"timeout must be a number of seconds, not {given!r}")
    return float(given) if given < MOST_SECONDS else MOST_SECONDS


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.prompt_text = prompt
    elif not hasattr(prompt, "__getitem__") or isinstance(prompt, bytes | Mapping):
        raise TypeError(f"a prompt is text, token ids or a conversation, not {type(prompt).__name__}")
    elif len(prompt) and isinstance(prompt[0], str):
        raise TypeError("a prompt is text, token ids or a conversation, not several texts: ask once for each, or use LLM.generate")
    elif len(prompt) and not isinstance(prompt[0], Integral):
        spec.chat.CopyFrom(chat_prompt(cast(Chat, prompt)))
    else:
        try:
            spec.prompt_token_ids.ids.extend(cast(Sequence[int], prompt))
        except (ValueError, TypeError) as error:
            raise ValueError(f"prompt token ids must be whole numbers from 0 to 2**32 - 1: {error}") from None
        spec.prompt_token_ids.SetInParent()
