"""From a Submit to a Request, or to the reason why not. Nothing is changed here."""

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pagecast_scheduler.core import policy
from pagecast_scheduler.core.estimates import Estimates
from pagecast_scheduler.core.prefix_cache import HashChain
from pagecast_scheduler.core.request import NEVER, Request, Sequence, slot_of
from pagecast_scheduler.core.state import State
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import Priority, Rejected, RejectReason, Submit
from pagecast_wire.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS, SamplingParams

_NAMESPACE_BYTES = 32
_PRIORITIES = frozenset(Priority)
_MAX_SEQUENCES = 1024  # front ends set the limit that callers see; this one keeps a broken one from filling the memory


def check(s: State, submit: Submit) -> Rejected | None:
    """The first reason to refuse, or None. Order: what is wrong with the message, what can never fit, what does not fit now."""
    return _malformed(s, submit) or _never_fits(s, submit) or _not_now(s, submit)


def _malformed(s: State, submit: Submit) -> Rejected | None:
    key = submit.key
    if key in s.requests:
        return Rejected(key, RejectReason.DUPLICATE_KEY, "key")
    stop, history = submit.stop, submit.history
    if len(submit.prompt) % 4 or len(stop.stop_token_ids) % 4 or any(len(column) % 4 for column in history):
        return Rejected(key, RejectReason.INVALID, "prompt")
    checks = (
        ("prompt", len(submit.prompt) > 0), ("num_sequences", 1 <= submit.num_sequences <= _MAX_SEQUENCES),
        ("history", not history or len(history) == submit.num_sequences), ("max_output_tokens", stop.max_output_tokens >= 1),
        ("min_output_tokens", 0 <= stop.min_output_tokens <= stop.max_output_tokens),
        ("sampling", _sampling_is_sound(submit.sampling)), ("priority", submit.priority in _PRIORITIES),
        ("cache_namespace", len(submit.cache_namespace) == _NAMESPACE_BYTES),
    )  # fmt: skip
    for field, right in checks:
        if not right:
            return Rejected(key, RejectReason.INVALID, field)
    return None


def _sampling_is_sound(sampling: SamplingParams) -> bool:
    """Whether workers can hold the rules for tokens: columns that belong together, numbers within the wire's limits."""
    if sampling.num_logprobs > MAX_LOGPROBS or sampling.num_prompt_logprobs > MAX_LOGPROBS or sampling.repetition_penalty <= 0:
        return False
    columns = (sampling.logit_bias_ids, sampling.allowed_token_ids, sampling.bad_word_tokens, sampling.bad_word_lengths)
    if not any(columns):
        return not sampling.logit_bias_values
    if any(len(column) % 4 for column in columns) or len(sampling.logit_bias_ids) != len(sampling.logit_bias_values):
        return False
    if len(sampling.bad_word_lengths) // 4 > MAX_BAD_WORDS:
        return False
    lengths = view_u32(sampling.bad_word_lengths)
    in_range = ((lengths >= 1) & (lengths <= MAX_BAD_WORD_TOKENS)).all()
    return bool(in_range) and 4 * int(lengths.sum()) == len(sampling.bad_word_tokens)


def _never_fits(s: State, submit: Submit) -> Rejected | None:
    num_prompt = len(submit.prompt) // 4
    if num_prompt > s.config.max_model_len - 1:
        return Rejected(submit.key, RejectReason.PROMPT_TOO_LONG, "prompt", s.config.max_model_len - 1, num_prompt)
    total, limit = num_prompt + submit.stop.max_output_tokens, min(s.config.max_model_len, s.config.pool_tokens)
    if total > limit:
        return Rejected(submit.key, RejectReason.TOO_MANY_TOKENS, "max_output_tokens", limit, total)
    return None


def _not_now(s: State, submit: Submit) -> Rejected | None:
    if submit.history:
        return None  # accepted once already: it comes back after a scheduler was lost
    estimates, config, num_prompt = s.estimates, s.config, len(submit.prompt) // 4
    if s.num_queued_requests >= config.max_queued_requests or s.num_queued_tokens + num_prompt > config.max_queued_tokens:
        return Rejected(submit.key, RejectReason.OVERLOADED, retry_after_ms=estimates.retry_after_ms(s.num_queued_tokens))
    if submit.deadline_ms >= 0 and not 0 <= submit.time_budget_ms < submit.deadline_ms:  # a budget that ends sooner ends it well
        least = _least_time(estimates, submit, num_prompt, config.max_num_batched_tokens)
        if submit.deadline_ms == 0 or policy.cannot_finish(least, submit.deadline_ms * 1000, config.estimate_percent):
            return Rejected(submit.key, RejectReason.DEADLINE_UNREACHABLE, "deadline_ms", submit.deadline_ms, least // 1000)
    if submit.max_queue_ms >= 0:
        wait = estimates.queue_us(s.num_queued_tokens)
        if policy.cannot_finish(wait, submit.max_queue_ms * 1000, config.estimate_percent):
            return Rejected(submit.key, RejectReason.QUEUE_TIME_EXCEEDED, "max_queue_ms", submit.max_queue_ms, wait // 1000)
    return None


def _least_time(estimates: Estimates, submit: Submit, num_prompt: int, max_num_batched_tokens: int) -> int:
    return estimates.finish_us(num_prompt, least_output(submit), max_num_batched_tokens)


def least_output(submit: Submit) -> int:
    """Output tokens that a request produces at least: all of them only if no token can end it sooner."""
    stop = submit.stop
    return max(1, stop.min_output_tokens) if stop.stop_token_ids else stop.max_output_tokens


def build(s: State, submit: Submit, now: int) -> Request:
    """The request and its sequences, WAITING. Its tenant is entered by the caller."""
    if submit.sampling.num_prompt_logprobs >= 0:  # of tokens that are not computed nothing could be told
        submit = replace(submit, bypass_prefix_cache=True)
    prompt = view_u32(submit.prompt)
    stop = submit.stop
    request = Request(
        key=submit.key, slot=slot_of(submit.key), submit=submit, num_prompt_tokens=len(prompt),
        max_tokens=len(prompt) + stop.max_output_tokens, min_tokens=len(prompt) + stop.min_output_tokens, arrival=now, order=s.orders,
        tenant=-1, deadline=_absolute(now, submit.deadline_ms), budget_end=_absolute(now, submit.time_budget_ms),
        queue_end=_absolute(now, submit.max_queue_ms), started=any(submit.history),
    )  # fmt: skip
    histories = [view_u32(column) for column in submit.history] or [prompt[:0]] * submit.num_sequences
    for index, history in enumerate(histories):
        tokens: NDArray[np.uint32] = np.concatenate([prompt, history]) if len(history) else prompt
        chain = HashChain(submit.cache_namespace, s.config.block_size)
        request.sequences.append(Sequence(request, index, tokens, len(tokens), chain))
    return request


def _absolute(now: int, relative_ms: int) -> int:
    return NEVER if relative_ms < 0 else now + relative_ms * 1000
