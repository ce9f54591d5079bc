"""Turns what a caller says into the API's request messages. Checks only what the messages cannot hold; the server the rest."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, cast

from google.protobuf.duration_pb2 import Duration

from pagecast.sampling import SamplingParams
from pagecast.types import ChatMessage
from pagecast.v1 import generation_pb2 as pb

Chat = Sequence[ChatMessage | Mapping[str, str]]
Prompt = str | Sequence[int] | Chat
"""Text; token ids; or a conversation, as ChatMessage values or mappings with `role` and `content`."""

Priority = Literal["batch", "normal", "interactive"]


class RequestOptions(TypedDict, total=False):
    """What may be said about one request besides prompt and sampling. Times in seconds.

    timeout: the call's deadline; the server stops the request when it passes. time_budget: end well, with what there is, after
    this time. max_queue_time: fail rather than wait longer. progress_interval: a Progress event after so long a silence.
    """

    model: str
    request_id: str
    timeout: float
    time_budget: float
    max_queue_time: float
    progress_interval: float
    priority: Priority
    cache_scope: str
    bypass_prefix_cache: bool


def generation_spec(prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions) -> pb.GenerationSpec:
    """The spec of one request. Raises ValueError or TypeError, naming the argument, for values that it cannot express."""
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no request option {sorted(unknown)[0]!r}; there are {', '.join(sorted(RequestOptions.__annotations__))}")
    spec = pb.GenerationSpec(model=options.get("model", ""), request_id=options.get("request_id", ""))
    _set_prompt(spec, prompt)
    (sampling or SamplingParams()).fill(spec)
    spec.cache.cache_scope = options.get("cache_scope", "")
    if "bypass_prefix_cache" in options:
        spec.cache.bypass_prefix_cache = options["bypass_prefix_cache"]
    if "priority" in options:
        spec.scheduling.priority = pb.Priority.Value(f"PRIORITY_{options['priority'].upper()}")
    if "max_queue_time" in options:
        spec.scheduling.max_queue_time.CopyFrom(duration(options["max_queue_time"]))
    if "time_budget" in options:
        spec.stopping.time_budget.CopyFrom(duration(options["time_budget"]))
    return spec


def delivery(options: RequestOptions) -> pb.DeliveryOptions:
    """How a stream is to be delivered."""
    message = pb.DeliveryOptions()
    if "progress_interval" in options:
        message.progress_interval.CopyFrom(duration(options["progress_interval"]))
    return message


def chat_prompt(messages: Chat) -> pb.ChatPrompt:
    """A conversation as the API's message."""
    pairs = [(m.role, m.content) if isinstance(m, ChatMessage) else (m["role"], m["content"]) for m in messages]
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in pairs])


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    nanos = round(seconds * 1e9)
    return Duration(seconds=int(nanos / 1_000_000_000), nanos=nanos - int(nanos / 1_000_000_000) * 1_000_000_000)


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.prompt_text = prompt
    elif len(prompt) and not isinstance(prompt[0], int):
        spec.chat.CopyFrom(chat_prompt(cast(Chat, prompt)))
    else:
        try:
            spec.prompt_token_ids.ids.extend(cast(Sequence[int], prompt))
        except (ValueError, TypeError) as error:
            raise ValueError(f"prompt token ids must be whole numbers from 0 to 2**32 - 1: {error}") from None
        spec.prompt_token_ids.SetInParent()
