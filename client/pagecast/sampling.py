"""SamplingParams: how to pick tokens, what the output must be, and when to stop, under the names that vLLM's users know."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pagecast.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """None leaves a value to the server: the model's own default. docs/api.md has every rule.

    temperature: 0 is greedy. top_k: how many of the likeliest tokens stay; 0 or -1 keeps all. top_p: share of probability that
    stays, in (0, 1]. min_p: least share of the likeliest token's probability, 0 to 1. presence_penalty, frequency_penalty: -2 to 2,
    for tokens of the output; repetition_penalty: for those of prompt and output, 1 is off. logit_bias: token id to -100..100.
    allowed_token_ids: no others. bad_words, bad_token_sequences: what must not appear. seed: the same seed gives the same tokens, in
    whatever company. n: outputs for one prompt.

    max_tokens: output tokens at most; None is as many as fit the model's length. min_tokens: no end before so many. stop: texts that
    end the output, which is cut before them (include_stop_str_in_output: after). stop_token_ids: ids that end it. ignore_eos: the
    model's end tokens do not end it.

    json_schema (text or mapping), json_object, regex, choices, grammar (Lark): what the output must be; one of them at most.

    logprobs, prompt_logprobs: log-probabilities of output and prompt tokens, with so many of the likeliest beside each;
    prompt_logprobs_positions: of the prompt's last so many alone. raw_bytes: what the tokens stand for as bytes, too.
    detokenize: False leaves the text out. skip_special_tokens: False shows them in the text. parse_reasoning, parse_tool_calls:
    whether reasoning and tool calls come apart from the text; None is by the model's family.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_token_sequences: Sequence[Sequence[int]] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_positions: int | None = None
    raw_bytes: bool = False
    detokenize: bool = True
    skip_special_tokens: bool | None = None
    parse_reasoning: bool | None = None
    parse_tool_calls: bool | None = None

    def fill(self, spec: pb.GenerationSpec) -> None:
        """Write these values into `spec`. Raises ValueError, naming the parameter, for a value that the message cannot hold."""
        set_count("top_k", spec.sampling, "top_k", 0 if self.top_k == -1 else self.top_k)
        set_count("seed", spec.sampling, "seed", self.seed)
        set_count("n", spec.sampling, "num_sequences", self.n)
        set_count("max_tokens", spec.stopping, "max_output_tokens", self.max_tokens)
        set_count("min_tokens", spec.stopping, "min_output_tokens", self.min_tokens)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if getattr(self, name) is not None:
                setattr(spec.sampling, name, getattr(self, name))
        self._fill_token_rules(spec.sampling)
        self._fill_stopping(spec.stopping)
        self._fill_constraint(spec)
        self._fill_output(spec.output)

    def _fill_token_rules(self, options: pb.SamplingOptions) -> None:
        for token_id, bias in (self.logit_bias or {}).items():
            options.logit_bias.add(token_id=_ids("logit_bias", [token_id])[0], bias=bias)
        if self.allowed_token_ids is not None:
            options.allowed_token_ids.SetInParent()
            options.allowed_token_ids.ids.extend(_ids("allowed_token_ids", self.allowed_token_ids))
        options.bad_words.extend(_texts("bad_words", self.bad_words))
        for sequence in self.bad_token_sequences or ():
            options.bad_token_sequences.add(ids=_ids("bad_token_sequences", sequence))

    def _fill_stopping(self, options: pb.StoppingOptions) -> None:
        options.stop_texts.extend([self.stop] if isinstance(self.stop, str) else self.stop or ())
        options.stop_token_ids.extend(_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.ignore_eos is not None:
            options.ignore_eos = self.ignore_eos
        if self.include_stop_str_in_output is not None:
            options.include_stop_in_output = self.include_stop_str_in_output

    def _fill_constraint(self, spec: pb.GenerationSpec) -> None:
        given = [name for name in ("json_schema", "regex", "choices", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}, not both")
        if self.json_schema is not None:
            text = self.json_schema if isinstance(self.json_schema, str) else json.dumps(self.json_schema)
            spec.constraint.json_schema = text
        elif self.json_object:
            spec.constraint.json_object.SetInParent()
        elif self.regex is not None:
            spec.constraint.regex = self.regex
        elif self.choices is not None:
            spec.constraint.choices.SetInParent()
            spec.constraint.choices.texts.extend(_texts("choices", self.choices))
        elif self.grammar is not None:
            spec.constraint.grammar = self.grammar

    def _fill_output(self, options: pb.OutputOptions) -> None:
        options.text = self.detokenize
        for name in ("skip_special_tokens", "parse_reasoning", "parse_tool_calls"):
            if getattr(self, name) is not None:
                setattr(options, name, getattr(self, name))
        if self.logprobs is not None:
            options.logprobs.SetInParent()
            set_count("logprobs", options.logprobs, "top_n", self.logprobs)
        if self.prompt_logprobs is not None:
            options.prompt_logprobs.SetInParent()
            set_count("prompt_logprobs", options.prompt_logprobs, "top_n", self.prompt_logprobs)
            set_count("prompt_logprobs_positions", options.prompt_logprobs, "max_positions", self.prompt_logprobs_positions)
        elif self.prompt_logprobs_positions is not None:
            raise ValueError("prompt_logprobs_positions goes with prompt_logprobs")
        if self.raw_bytes:
            options.raw_bytes = True


def set_count(
    name: str, message: pb.SamplingOptions | pb.StoppingOptions | pb.LogprobsOptions | pb.DeliveryOptions, field: str, value: int | None
) -> None:
    """Set an integer field, unless None. Raises ValueError, naming the parameter."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError):
        bits = 64 if name == "seed" else 32
        raise ValueError(f"{name} must be a whole number from 0 to 2**{bits} - 1, not {value!r}") from None


def _ids(name: str, ids: Sequence[int]) -> Sequence[int]:
    """`ids`, if every one fits a token id of the API. Raises ValueError."""
    for value in ids:
        is_whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
        if not is_whole or not 0 <= value < 1 << 32:
            raise ValueError(f"{name} must hold whole numbers from 0 to 2**32 - 1, not {value!r}")
    return ids


def _texts(name: str, texts: Sequence[str] | None) -> Sequence[str]:
    """`texts`, unless it is one text. Raises ValueError."""
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a sequence of texts, not one text")
    return texts or ()
