"""Checks a GenerationSpec against the table of limits and turns it into effective values.

Pure: values in, values out. Every violation of a request is found and listed with its field path, the limit and the value.
What needs the prompt's length is checked by `check_lengths`, after tokenization.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.limits import Limits
from pagecast_wire.intake import Priority
from pagecast_wire.sampling import SamplingParams

GREEDY_BELOW = 1e-4
"""Smaller temperatures are greedy for every purpose, and would overflow when logits are divided by them; they become 0."""

MAX_FIELD_ECHO = 64
"""Longest text value that a violation repeats."""

_PRIORITIES = {
    generation_pb2.PRIORITY_BATCH: Priority.BATCH,
    generation_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    generation_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}
"""Unspecified and unknown values are NORMAL."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's own generation configuration asks for where a request is silent."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckedSpec:
    """A valid request, defaults applied, except for what depends on the prompt's length.

    prompt_path: the field that holds the prompt. max_output_tokens: None means as many as fit. Times in milliseconds, -1 for none.
    """

    prompt_path: str
    sampling: SamplingParams
    max_output_tokens: int | None
    min_output_tokens: int
    stop_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    want_text: bool
    want_token_ids: bool
    bypass_prefix_cache: bool
    cache_scope: str
    priority: int
    time_budget_ms: int
    max_queue_ms: int


class _Findings(list[Violation]):
    """Violations so far."""

    def add(self, path: str, description: str) -> None:
        self.append(Violation(path, description))

    def number(self, path: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
        """Checks that a number is finite and in [low, high], or (low, high]."""
        if not math.isfinite(value):
            self.add(path, f"must be a finite number, not {value}")
        elif value < low or value > high or (open_low and value == low):
            left = f"greater than {low:g} and at most {high:g}" if open_low else f"{low:g} to {high:g}"
            self.add(path, f"must be {left}, not {value:g}")

    def integer(self, path: str, value: int, low: int, high: int) -> None:
        """Checks that an integer is in [low, high]."""
        if not low <= value <= high:
            self.add(path, f"must be {low} to {high}, not {value}")

    def token_ids(self, path: str, ids: Sequence[int], vocab_size: int) -> None:
        """Names the first id outside the vocabulary."""
        bad = np.flatnonzero(np.asarray(ids, dtype=np.int64) >= vocab_size)
        if bad.size:
            self.add(f"{path}[{int(bad[0])}]", f"must be below the vocabulary size {vocab_size}, not {ids[int(bad[0])]}")


def is_request_id(text: str, max_length: int) -> bool:
    """Printable ASCII without spaces, 1 to max_length characters."""
    return 0 < len(text) <= max_length and all(33 <= ord(c) <= 126 for c in text)


def _optional(message: Any, field: str, default: Any) -> Any:
    return getattr(message, field) if message.HasField(field) else default


def _sampling(options: Any, defaults: SamplingDefaults, seed: int, limits: Limits, found: _Findings) -> SamplingParams:
    """Effective sampling values; `seed` is used where the request names none."""
    temperature = _optional(options, "temperature", defaults.temperature)
    top_k = _optional(options, "top_k", min(defaults.top_k, limits.vocab_size))
    top_p = _optional(options, "top_p", defaults.top_p)
    min_p = _optional(options, "min_p", defaults.min_p)
    found.number("spec.sampling.temperature", temperature, 0.0, limits.max_temperature)
    found.integer("spec.sampling.top_k", top_k, 0, limits.vocab_size)
    found.number("spec.sampling.top_p", top_p, 0.0, 1.0, open_low=True)
    found.number("spec.sampling.min_p", min_p, 0.0, 1.0)
    if 0 < temperature < GREEDY_BELOW:
        temperature = 0.0
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=_optional(options, "seed", seed))


def _duration_ms(message: Any, field: str, path: str, limits: Limits, found: _Findings) -> int:
    """A Duration field in whole milliseconds, at least 1; -1 when absent."""
    if not message.HasField(field):
        return -1
    value: Duration = getattr(message, field)
    seconds = value.seconds + value.nanos / 1e9
    well_formed = -999_999_999 <= value.nanos <= 999_999_999
    if not well_formed or not 0 < seconds <= limits.max_duration_s:
        found.add(path, f"must be more than 0 s and at most {limits.max_duration_s} s, not {seconds:g} s")
        return -1
    return max(1, int(value.seconds * 1000 + value.nanos // 1_000_000))


def _stopping(options: Any, limits: Limits, found: _Findings) -> None:
    """Checks of the stopping group that need no prompt."""
    path = "spec.stopping"
    if options.HasField("max_output_tokens"):
        found.integer(f"{path}.max_output_tokens", options.max_output_tokens, 1, limits.max_request_tokens - 1)
        if options.min_output_tokens > options.max_output_tokens:
            text = f"must be at most max_output_tokens {options.max_output_tokens}, not {options.min_output_tokens}"
            found.add(f"{path}.min_output_tokens", text)
    else:
        found.integer(f"{path}.min_output_tokens", options.min_output_tokens, 0, limits.max_request_tokens - 1)
    if len(options.stop_texts) > limits.max_stop_texts:
        found.add(f"{path}.stop_texts", f"must be at most {limits.max_stop_texts} texts, not {len(options.stop_texts)}")
    for i, text in enumerate(options.stop_texts[: limits.max_stop_texts]):
        size = len(text.encode())
        if not 1 <= size <= limits.max_stop_text_bytes:
            found.add(f"{path}.stop_texts[{i}]", f"must be 1 to {limits.max_stop_text_bytes} bytes, not {size}")
    if len(options.stop_token_ids) > limits.max_stop_token_ids:
        found.add(f"{path}.stop_token_ids", f"must be at most {limits.max_stop_token_ids} ids, not {len(options.stop_token_ids)}")
    else:
        found.token_ids(f"{path}.stop_token_ids", options.stop_token_ids, limits.vocab_size)


def check_chat(chat: Any, path: str, limits: Limits, found: list[Violation]) -> None:
    """Checks a ChatPrompt: at least one message, not too many, a plain role each."""
    if not 1 <= len(chat.messages) <= limits.max_chat_messages:
        found.append(Violation(f"{path}.messages", f"must be 1 to {limits.max_chat_messages} messages, not {len(chat.messages)}"))
        return
    for i, message in enumerate(chat.messages):
        if not is_request_id(message.role, limits.max_role_length):
            shown = f"{len(message.role)} characters" if len(message.role) > MAX_FIELD_ECHO else repr(message.role)
            text = f"must be 1 to {limits.max_role_length} printable ASCII characters without spaces, not {shown}"
            found.append(Violation(f"{path}.messages[{i}].role", text))


def _input(spec: Any, limits: Limits, found: _Findings) -> None:
    """Checks of the prompt that need no tokenizer."""
    kind = spec.WhichOneof("input")
    if kind is None:
        found.add("spec.input", "must hold one of prompt_text, prompt_token_ids and chat")
    elif kind == "prompt_text":
        if not spec.prompt_text:
            found.add("spec.prompt_text", "must not be empty")
    elif kind == "prompt_token_ids":
        if not spec.prompt_token_ids.ids:
            found.add("spec.prompt_token_ids.ids", "must not be empty")
        found.token_ids("spec.prompt_token_ids.ids", spec.prompt_token_ids.ids, limits.vocab_size)
    else:
        check_chat(spec.chat, "spec.chat", limits, found)


def check_spec(spec: Any, defaults: SamplingDefaults, seed: int, limits: Limits) -> CheckedSpec:
    """Effective values of a valid request. Raises Refusal with every violation found."""
    found = _Findings()
    if spec.request_id and not is_request_id(spec.request_id, limits.max_request_id_length):
        found.add("spec.request_id", f"must be at most {limits.max_request_id_length} printable ASCII characters without spaces")
    _input(spec, limits, found)
    sampling = _sampling(spec.sampling, defaults, seed, limits, found)
    stopping = spec.stopping
    _stopping(stopping, limits, found)
    time_budget_ms = _duration_ms(stopping, "time_budget", "spec.stopping.time_budget", limits, found)
    max_queue_ms = _duration_ms(spec.scheduling, "max_queue_time", "spec.scheduling.max_queue_time", limits, found)
    scope = len(spec.cache.cache_scope.encode())
    if scope > limits.max_cache_scope_length:
        found.add("spec.cache.cache_scope", f"must be at most {limits.max_cache_scope_length} bytes, not {scope}")
    if found:
        raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(found))
    return CheckedSpec(
        prompt_path=f"spec.{spec.WhichOneof('input')}",
        sampling=sampling,
        max_output_tokens=_optional(stopping, "max_output_tokens", None),
        min_output_tokens=stopping.min_output_tokens,
        stop_texts=tuple(stopping.stop_texts),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        want_text=_optional(spec.output, "text", True),
        want_token_ids=_optional(spec.output, "token_ids", True),
        bypass_prefix_cache=spec.cache.bypass_prefix_cache,
        cache_scope=spec.cache.cache_scope,
        priority=_PRIORITIES.get(spec.scheduling.priority, Priority.NORMAL),
        time_budget_ms=time_budget_ms,
        max_queue_ms=max_queue_ms,
    )


def progress_interval_s(delivery: Any, limits: Limits, default: float = 15.0) -> float:
    """Seconds of silence before a progress event. Raises Refusal when out of range."""
    if not delivery.HasField("progress_interval"):
        return default
    seconds: float = delivery.progress_interval.seconds + delivery.progress_interval.nanos / 1e9
    if not limits.min_progress_s <= seconds <= limits.max_progress_s:
        text = f"must be {limits.min_progress_s:g} s to {limits.max_progress_s:g} s, not {seconds:g} s"
        raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation("delivery.progress_interval", text),))
    return seconds


def check_prompt_length(num_prompt_tokens: int, path: str, limits: Limits, *, is_least: bool = False) -> None:
    """Raises Refusal unless the prompt leaves room for one output token. is_least: the prompt has so many tokens or more."""
    limit = limits.max_request_tokens - 1
    if num_prompt_tokens > limit:
        text = f"the prompt must be at most {limit} tokens, not {num_prompt_tokens}{' or more' if is_least else ''}"
        facts = {"limit": str(limit), "actual": str(num_prompt_tokens)}
        raise Refusal(Reason.PROMPT_TOO_LONG, violations=(Violation(path, text),), metadata=facts)


def check_lengths(checked: CheckedSpec, prompt: Sequence[int], limits: Limits) -> int:
    """The effective max_output_tokens of a tokenized request. Raises Refusal when prompt and output can never fit."""
    found = _Findings()
    found.token_ids(checked.prompt_path, prompt, limits.vocab_size)
    if found:
        raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(found))
    if not prompt:
        raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation(checked.prompt_path, "must hold at least one token"),))
    check_prompt_length(len(prompt), checked.prompt_path, limits)
    room = limits.max_request_tokens - len(prompt)
    if checked.max_output_tokens is not None and checked.max_output_tokens > room:
        which = "max_model_len" if limits.max_model_len <= limits.max_pool_tokens else "max_pool_tokens"
        found.add(
            "spec.stopping.max_output_tokens",
            f"prompt of {len(prompt)} tokens and {checked.max_output_tokens} output tokens exceed {which} {limits.max_request_tokens}",
        )
    max_output = room if checked.max_output_tokens is None else checked.max_output_tokens
    if checked.min_output_tokens > max_output and not found:
        found.add("spec.stopping.min_output_tokens", f"must be at most {max_output}, not {checked.min_output_tokens}")
    if found:
        raise Refusal(Reason.FIELD_VIOLATION, violations=tuple(found))
    return max_output
