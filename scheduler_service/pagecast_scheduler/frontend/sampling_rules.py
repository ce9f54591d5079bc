"""Checks SamplingOptions against the table of limits and turns them into effective values."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.limits import Limits
from pagecast_wire import pack_u32
from pagecast_wire.sampling import SamplingParams

GREEDY_BELOW = 1e-4
"""Smaller temperatures are greedy for every purpose, and would overflow when logits are divided by them; they become 0."""

_PATH = "spec.sampling"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's own generation configuration asks for where a request is silent."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def optional(message: Any, field: str, default: Any) -> Any:
    """A field's value, or the default where it is absent."""
    return getattr(message, field) if message.HasField(field) else default


def sampling_of(options: Any, defaults: SamplingDefaults, seed: int, limits: Limits, found: Findings) -> SamplingParams:
    """Effective sampling values, bad words left out; `seed` is used where the request names none."""
    temperature = optional(options, "temperature", defaults.temperature)
    top_k = optional(options, "top_k", min(defaults.top_k, limits.vocab_size))
    top_p = optional(options, "top_p", defaults.top_p)
    min_p = optional(options, "min_p", defaults.min_p)
    found.number(f"{_PATH}.temperature", temperature, 0.0, limits.max_temperature)
    found.integer(f"{_PATH}.top_k", top_k, 0, limits.vocab_size)
    found.number(f"{_PATH}.top_p", top_p, 0.0, 1.0, open_low=True)
    found.number(f"{_PATH}.min_p", min_p, 0.0, 1.0)
    if 0 < temperature < GREEDY_BELOW:
        temperature = 0.0
    biases = options.logit_bias
    if biases:
        _check_biases(biases, limits, found)
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=optional(options, "seed", seed),
        logit_bias_ids=pack_u32([b.token_id for b in biases]) if biases else b"",
        logit_bias_values=np.array([b.bias for b in biases], dtype="<f4").tobytes() if biases else b"",
        allowed_token_ids=_allowed(options, limits, found),
        **_penalties(options, defaults, limits, found),
    )


def _penalties(options: Any, defaults: SamplingDefaults, limits: Limits, found: Findings) -> dict[str, float]:
    values: dict[str, float] = {
        "presence_penalty": optional(options, "presence_penalty", 0.0),
        "frequency_penalty": optional(options, "frequency_penalty", 0.0),
        "repetition_penalty": optional(options, "repetition_penalty", defaults.repetition_penalty),
    }
    for name in ("presence_penalty", "frequency_penalty"):
        found.number(f"{_PATH}.{name}", values[name], -limits.max_penalty, limits.max_penalty)
    found.number(f"{_PATH}.repetition_penalty", values["repetition_penalty"], 0.0, limits.max_repetition_penalty, open_low=True)
    return values


def _check_biases(biases: Any, limits: Limits, found: Findings) -> None:
    path = f"{_PATH}.logit_bias"
    if not found.count(path, len(biases), 0, limits.max_logit_bias_tokens, "tokens"):
        return
    for at, bias in enumerate(biases):
        found.integer(f"{path}[{at}].token_id", bias.token_id, 0, limits.vocab_size - 1)
        found.number(f"{path}[{at}].bias", bias.bias, -limits.max_logit_bias, limits.max_logit_bias)
    found.repeated(path, [b.token_id for b in biases], ".token_id")


def _allowed(options: Any, limits: Limits, found: Findings) -> bytes:
    if not options.HasField("allowed_token_ids"):
        return b""
    ids, path = options.allowed_token_ids.ids, f"{_PATH}.allowed_token_ids.ids"
    if found.count(path, len(ids), 1, limits.max_allowed_token_ids, "ids"):
        found.token_ids(path, ids, limits.vocab_size)
        found.repeated(path, ids)
    return pack_u32(ids)


def num_sequences_of(options: Any, limits: Limits, found: Findings) -> int:
    """How many outputs are wanted."""
    number: int = optional(options, "num_sequences", 1)
    found.integer(f"{_PATH}.num_sequences", number, 1, limits.max_num_sequences)
    return number


def check_bad_words(options: Any, limits: Limits, found: Findings) -> None:
    """Checks of bad_words and bad_token_sequences that need no tokenizer."""
    words, sequences = options.bad_words, options.bad_token_sequences
    total = len(words) + len(sequences)
    if not found.count(f"{_PATH}.{'bad_words' if words else 'bad_token_sequences'}", total, 0, limits.max_bad_sequences, "together"):
        return
    for at, word in enumerate(words):
        size = len(word.encode())
        if not 1 <= size <= limits.max_stop_text_bytes:
            found.add(f"{_PATH}.bad_words[{at}]", f"must be 1 to {limits.max_stop_text_bytes} bytes, not {size}")
    for at, sequence in enumerate(sequences):
        path = f"{_PATH}.bad_token_sequences[{at}].ids"
        if found.count(path, len(sequence.ids), 1, limits.max_bad_sequence_tokens, "tokens"):
            found.token_ids(path, sequence.ids, limits.vocab_size)


def with_bad_words(sampling: SamplingParams, words: list[list[list[int]]], sequences: list[list[int]], limits: Limits) -> SamplingParams:
    """Adds what must not appear. words: for each bad word, the ways in which it may be written as tokens. Raises Refusal."""
    found = Findings()
    every: dict[tuple[int, ...], None] = {tuple(sequence): None for sequence in sequences}
    for at, ways in enumerate(words):
        for ids in ways:
            if found.count(f"{_PATH}.bad_words[{at}]", len(ids), 1, limits.max_bad_sequence_tokens, "tokens"):
                every[tuple(ids)] = None
    path = f"{_PATH}.bad_words"
    found.count(path, len(every), 0, limits.max_bad_sequences, "token sequences, each word with and without a space before it,")
    found.refuse()
    if not every:
        return sampling
    return msgspec.structs.replace(
        sampling,
        bad_word_tokens=pack_u32([token for sequence in every for token in sequence]),
        bad_word_lengths=pack_u32([len(sequence) for sequence in every]),
    )


def check_something_allowed(allowed: list[int], banned: set[int]) -> None:
    """Raises Refusal if every allowed id is impossible for the first token."""
    if allowed and not set(allowed) - banned:
        found = Findings()
        found.add(f"{_PATH}.allowed_token_ids.ids", "no token is left: all are bad words, or end tokens before min_output_tokens")
        found.refuse()
