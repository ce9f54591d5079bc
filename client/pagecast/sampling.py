"""SamplingParams: how to pick tokens and when to stop, under the names that vLLM's users know."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagecast.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """None leaves a value to the server: the model's own default.

    temperature: 0 is greedy. top_k: how many of the likeliest tokens stay; 0 or -1 keeps all. top_p: share of probability that
    stays, in (0, 1]. min_p: least share of the likeliest token's probability, 0 to 1. seed: the same seed gives the same tokens,
    in whatever company. max_tokens: output tokens at most; None is as many as fit the model's length. min_tokens: no end before
    so many. stop: texts that end the output, which is cut before them. stop_token_ids: ids that end it. ignore_eos: the model's
    end tokens do not end it. detokenize: False leaves the text out, True the token ids in.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    detokenize: bool = True

    def fill(self, spec: pb.GenerationSpec) -> None:
        """Write these values into `spec`. Raises ValueError, naming the parameter, for a number that the message cannot hold."""
        _count("top_k", spec.sampling, "top_k", 0 if self.top_k == -1 else self.top_k)
        _count("seed", spec.sampling, "seed", self.seed)
        _count("max_tokens", spec.stopping, "max_output_tokens", self.max_tokens)
        _count("min_tokens", spec.stopping, "min_output_tokens", self.min_tokens)
        for name in ("temperature", "top_p", "min_p"):
            if getattr(self, name) is not None:
                setattr(spec.sampling, name, getattr(self, name))
        spec.stopping.stop_texts.extend([self.stop] if isinstance(self.stop, str) else self.stop or ())
        if self.stop_token_ids:
            spec.stopping.stop_token_ids.extend(_ids("stop_token_ids", self.stop_token_ids))
        if self.ignore_eos is not None:
            spec.stopping.ignore_eos = self.ignore_eos
        spec.output.text = self.detokenize


def _count(name: str, message: pb.SamplingOptions | pb.StoppingOptions, field: str, value: int | None) -> None:
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
        if not 0 <= value < 1 << 32:
            raise ValueError(f"{name} must hold whole numbers from 0 to 2**32 - 1, not {value!r}")
    return ids
