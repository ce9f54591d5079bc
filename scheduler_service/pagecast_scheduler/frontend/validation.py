"""Checks a GenerationSpec against the table of limits and turns it into effective values.

Pure: values in, values out. Every violation of a request is found and listed with its field path, the limit and the value.
What needs the prompt's length is checked by `check_lengths`, after tokenization.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2
from pagecast_scheduler.frontend.chat_rules import check_chat
from pagecast_scheduler.frontend.errors import Reason, Refusal, Violation
from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.labels import check_labels
from pagecast_scheduler.frontend.limits import Limits
from pagecast_scheduler.frontend.sampling_rules import (
    SamplingDefaults,
    check_bad_words,
    num_sequences_of,
    optional,
    sampling_of,
)
from pagecast_wire.intake import Priority
from pagecast_wire.sampling import SamplingParams

TOKEN_BYTES, RECORD_BYTES = 8, 18
"""Of a token with its text, and of one log-probability with its token, in an answer."""

_PRIORITIES = {
    generation_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    generation_pb2.PRIORITY_BATCH: Priority.BATCH,
    generation_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    generation_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}
_TRUNCATIONS = frozenset(generation_pb2.Truncate.values())


class CheckedSpec(msgspec.Struct, frozen=True, array_like=True):
    """A valid request, defaults applied, except for what depends on the prompt's length.

    prompt_path: the field that holds the prompt. sampling: without bad words and constraint, which need the tokenizer and a compiler.
    max_output_tokens: None means as many as fit. parse_...: None leaves it to the model's family. truncate: which end of a long prompt is
    dropped, by its number in the API; num_truncated: how much was. max_prompt_positions: of log-probabilities, None for all. Times in
    milliseconds, -1 for none.
    """

    prompt_path: str
    sampling: SamplingParams
    num_sequences: int
    bad_words: tuple[str, ...]
    bad_token_sequences: tuple[tuple[int, ...], ...]
    max_output_tokens: int | None
    min_output_tokens: int
    stop_texts: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    parse_reasoning: bool | None
    parse_tool_calls: bool | None
    want_text: bool
    want_token_ids: bool
    bypass_prefix_cache: bool
    cache_scope: str
    priority: int
    time_budget_ms: int
    max_queue_ms: int
    truncate: int = 0
    num_truncated: int = 0
    want_raw_bytes: bool = False
    max_prompt_positions: int | None = None


def is_request_id(text: str, max_length: int) -> bool:
    """Printable ASCII without spaces, 1 to max_length characters."""
    return 0 < len(text) <= max_length and all(33 <= ord(c) <= 126 for c in text)


def _duration_ms(message: Any, field: str, path: str, limits: Limits, found: Findings) -> int:
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


def _stopping(options: Any, limits: Limits, found: Findings) -> None:
    """Checks of the stopping group that need no prompt."""
    path = "spec.stopping"
    if options.HasField("max_output_tokens"):
        found.integer(f"{path}.max_output_tokens", options.max_output_tokens, 1, limits.max_request_tokens - 1)
        if options.min_output_tokens > options.max_output_tokens:
            text = f"must be at most max_output_tokens {options.max_output_tokens}, not {options.min_output_tokens}"
            found.add(f"{path}.min_output_tokens", text)
    else:
        found.integer(f"{path}.min_output_tokens", options.min_output_tokens, 0, limits.max_request_tokens - 1)
    found.count(f"{path}.stop_texts", len(options.stop_texts), 0, limits.max_stop_texts, "texts")
    for i, text in enumerate(options.stop_texts[: limits.max_stop_texts]):
        size = len(text.encode())
        if not 1 <= size <= limits.max_stop_text_bytes:
            found.add(f"{path}.stop_texts[{i}]", f"must be 1 to {limits.max_stop_text_bytes} bytes, not {size}")
    stop_ids = options.stop_token_ids
    if stop_ids and found.count(f"{path}.stop_token_ids", len(stop_ids), 0, limits.max_stop_token_ids, "ids"):
        found.token_ids(f"{path}.stop_token_ids", stop_ids, limits.vocab_size)


def _input(spec: Any, limits: Limits, found: Findings) -> None:
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


def _with_logprobs(sampling: SamplingParams, output: Any, limits: Limits, found: Findings) -> SamplingParams:
    """Adds the log-probabilities that are asked for; -1: none."""
    wanted = {}
    for field, name in (("logprobs", "num_logprobs"), ("prompt_logprobs", "num_prompt_logprobs")):
        if output.HasField(field):
            wanted[name] = getattr(output, field).top_n
            found.integer(f"spec.output.{field}.top_n", wanted[name], 0, limits.max_logprobs)
    if wanted:
        _max_positions(output, found)
    return msgspec.structs.replace(sampling, **wanted) if wanted else sampling


def _max_positions(output: Any, found: Findings) -> None:
    if output.logprobs.HasField("max_positions"):
        found.add("spec.output.logprobs.max_positions", "is for prompt_logprobs alone")
    if output.prompt_logprobs.HasField("max_positions") and not output.prompt_logprobs.max_positions:
        found.add("spec.output.prompt_logprobs.max_positions", "must be at least 1, not 0")


def check_spec(spec: Any, defaults: SamplingDefaults, seed: int, limits: Limits) -> CheckedSpec:
    """Effective values of a valid request. Raises Refusal with every violation found."""
    found = Findings()
    if spec.request_id and not is_request_id(spec.request_id, limits.max_request_id_length):
        found.add("spec.request_id", f"must be at most {limits.max_request_id_length} printable ASCII characters without spaces")
    _input(spec, limits, found)
    if spec.scheduling.priority not in _PRIORITIES:
        found.add("spec.scheduling.priority", f"must be a Priority of this server's, not {spec.scheduling.priority}")
    sampling = sampling_of(spec.sampling, defaults, seed, limits, found)
    sampling = _with_logprobs(sampling, spec.output, limits, found)
    num_sequences = num_sequences_of(spec.sampling, limits, found)
    check_bad_words(spec.sampling, limits, found)
    stopping = spec.stopping
    _stopping(stopping, limits, found)
    time_budget_ms = _duration_ms(stopping, "time_budget", "spec.stopping.time_budget", limits, found)
    max_queue_ms = _duration_ms(spec.scheduling, "max_queue_time", "spec.scheduling.max_queue_time", limits, found)
    scope = len(spec.cache.cache_scope.encode())
    if scope > limits.max_cache_scope_length:
        found.add("spec.cache.cache_scope", f"must be at most {limits.max_cache_scope_length} bytes, not {scope}")
    if spec.labels:
        check_labels(spec.labels, limits, found)
    if spec.truncate not in _TRUNCATIONS:
        found.add("spec.truncate", f"must be a Truncate of this server's, not {spec.truncate}")
    found.refuse()
    return _checked(spec, sampling, num_sequences, time_budget_ms, max_queue_ms)


def _checked(spec: Any, sampling: SamplingParams, num_sequences: int, time_budget_ms: int, max_queue_ms: int) -> CheckedSpec:
    """The values of a spec that was found good."""
    stopping = spec.stopping
    return CheckedSpec(
        prompt_path=f"spec.{spec.WhichOneof('input')}",
        sampling=sampling,
        num_sequences=num_sequences,
        bad_words=tuple(spec.sampling.bad_words),
        bad_token_sequences=tuple(tuple(sequence.ids) for sequence in spec.sampling.bad_token_sequences),
        max_output_tokens=optional(stopping, "max_output_tokens", None),
        min_output_tokens=stopping.min_output_tokens,
        stop_texts=tuple(stopping.stop_texts),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop_in_output,
        skip_special_tokens=optional(spec.output, "skip_special_tokens", True),
        parse_reasoning=optional(spec.output, "parse_reasoning", None),
        parse_tool_calls=optional(spec.output, "parse_tool_calls", None),
        want_text=optional(spec.output, "text", True),
        want_token_ids=optional(spec.output, "token_ids", True),
        bypass_prefix_cache=spec.cache.bypass_prefix_cache,
        cache_scope=spec.cache.cache_scope,
        priority=_PRIORITIES[spec.scheduling.priority],
        time_budget_ms=time_budget_ms,
        max_queue_ms=max_queue_ms,
        truncate=spec.truncate,
        want_raw_bytes=spec.output.raw_bytes,
        max_prompt_positions=optional(spec.output.prompt_logprobs, "max_positions", None),
    )


def truncated(checked: CheckedSpec, prompt: Sequence[int], limits: Limits) -> tuple[CheckedSpec, Sequence[int]]:
    """The prompt, without as much of the end that the caller names as is needed to leave room for its output."""
    room = limits.max_request_tokens - (checked.max_output_tokens or 1)
    excess = len(prompt) - room
    if excess <= 0 or checked.truncate in (generation_pb2.TRUNCATE_UNSPECIFIED, generation_pb2.TRUNCATE_NONE):
        return checked, prompt
    kept = prompt[excess:] if checked.truncate == generation_pb2.TRUNCATE_START else prompt[:room]
    return msgspec.structs.replace(checked, num_truncated=excess), kept


def check_prompt_length(num_prompt_tokens: int, path: str, limits: Limits, *, is_least: bool = False) -> None:
    """Raises Refusal unless the prompt leaves room for one output token. is_least: the prompt has so many tokens or more."""
    limit = limits.max_request_tokens - 1
    if num_prompt_tokens > limit:
        text = f"the prompt must be at most {limit} tokens, not {num_prompt_tokens}{' or more' if is_least else ''}"
        facts = {"limit": str(limit), "actual": str(num_prompt_tokens)}
        raise Refusal(Reason.PROMPT_TOO_LONG, violations=(Violation(path, text),), metadata=facts)


def check_lengths(checked: CheckedSpec, prompt: Sequence[int], limits: Limits) -> int:
    """The effective max_output_tokens of a tokenized request. Raises Refusal when prompt and output can never fit."""
    found = Findings()
    found.token_ids(checked.prompt_path, prompt, limits.vocab_size)
    found.refuse()
    if not prompt:
        raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation(checked.prompt_path, "must hold at least one token"),))
    check_prompt_length(len(prompt), checked.prompt_path, limits)
    if checked.sampling.num_prompt_logprobs >= 0 and len(prompt) > limits.max_prompt_logprobs_tokens:
        text = f"is for prompts of at most {limits.max_prompt_logprobs_tokens} tokens, this one has {len(prompt)}"
        found.add("spec.output.prompt_logprobs", text)
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
    found.refuse()
    return max_output


def check_answer_size(checked: CheckedSpec, num_prompt_tokens: int, limits: Limits) -> None:
    """Raises Refusal when the output asked for, in one message, would be larger than a message may be. Bytes are typical ones."""
    if checked.max_output_tokens is None:
        return  # as long as it gets, which is seldom what would fit
    sampling = checked.sampling
    tokens = checked.num_sequences * checked.max_output_tokens
    size = TOKEN_BYTES * tokens
    for count, top_n in ((tokens, sampling.num_logprobs), (num_prompt_tokens, sampling.num_prompt_logprobs)):
        size += count * (RECORD_BYTES * (1 + top_n) if top_n >= 0 else 0)
    if size > limits.max_message_bytes:
        text = f"the answer may take {size} bytes, one message at most {limits.max_message_bytes}: ask for less, or use GenerateStream"
        raise Refusal(Reason.FIELD_VIOLATION, violations=(Violation("spec.stopping.max_output_tokens", text),))
