"""The validator against its table: every field's edges, every violation named."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import model_pb2
from pagecast_scheduler.frontend.delivery import check_delivery
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.limits import Limits
from pagecast_scheduler.frontend.sampling_rules import SamplingDefaults
from pagecast_scheduler.frontend.validation import check_lengths, check_spec
from pagecast_wire.intake import Priority

LIMITS = Limits(
    vocab_size=512,
    max_model_len=256,
    max_pool_tokens=256,
    max_message_bytes=1 << 20,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
)


def spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(**{"prompt_token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})


def violations(message: pb.GenerationSpec) -> dict[str, str]:
    try:
        check_spec(message, SamplingDefaults(), 7, LIMITS)
    except Refusal as refusal:
        assert refusal.reason is Reason.FIELD_VIOLATION
        return {v.field: v.description for v in refusal.violations}
    return {}


def bias(*pairs: tuple[int, float]) -> pb.GenerationSpec:
    return sampling(logit_bias=[pb.TokenBias(token_id=token_id, bias=value) for token_id, value in pairs])


def sampling(**fields: Any) -> pb.GenerationSpec:
    return spec(sampling=pb.SamplingOptions(**fields))


def stopping(**fields: Any) -> pb.GenerationSpec:
    return spec(stopping=pb.StoppingOptions(**fields))


BAD_FLOATS = [math.nan, math.inf, -math.inf]
SAMPLING = {
    "temperature": ([0.0, 1e-40, 0.5, 100.0], [-1.0, 100.1, 1e30, *BAD_FLOATS]),
    "top_p": ([1e-6, 0.5, 1.0], [0.0, -0.1, 1.0000001, 1.5, *BAD_FLOATS]),
    "min_p": ([0.0, 0.5, 1.0], [-0.1, 1.0000001, *BAD_FLOATS]),
    "top_k": ([0, 1, 512], [513, 1 << 31, (1 << 32) - 1]),
    "presence_penalty": ([-2.0, 0.0, 2.0], [-2.1, 2.1, *BAD_FLOATS]),
    "frequency_penalty": ([-2.0, 0.0, 2.0], [-2.1, 2.1, *BAD_FLOATS]),
    "repetition_penalty": ([1e-3, 1.0, 10.0], [0.0, -1.0, 10.1, *BAD_FLOATS]),
    "num_sequences": ([1, 64], [0, 65, (1 << 32) - 1]),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (good, _) in SAMPLING.items() for v in good])
def test_sampling_values_inside_the_range_pass(field: str, value: float) -> None:
    assert violations(sampling(**{field: value})) == {}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, (_, bad) in SAMPLING.items() for v in bad])
def test_sampling_values_outside_the_range_are_named(field: str, value: float) -> None:
    found = violations(sampling(**{field: value}))
    assert list(found) == [f"spec.sampling.{field}"]


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_every_seed_is_kept(seed: int) -> None:
    assert check_spec(sampling(seed=seed), SamplingDefaults(), 7, LIMITS).sampling.seed == seed


def test_absent_values_take_the_defaults_and_a_present_zero_is_zero() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=40, top_p=0.9, min_p=0.1)
    absent = check_spec(spec(), defaults, 7, LIMITS).sampling
    assert (absent.temperature, absent.top_k, absent.top_p, absent.min_p, absent.seed) == (0.6, 40, 0.9, 0.1, 7)
    present = check_spec(sampling(temperature=0, top_k=0, min_p=0, seed=0), defaults, 7, LIMITS).sampling
    assert (present.temperature, present.top_k, present.min_p, present.seed) == (0.0, 0, 0.0, 0)


def test_tiny_temperatures_are_greedy() -> None:
    assert check_spec(sampling(temperature=1e-40), SamplingDefaults(), 7, LIMITS).sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.GenerationSpec(), "spec.input"),
        (pb.GenerationSpec(prompt_text=""), "spec.prompt_text"),
        (spec(prompt_token_ids=pb.TokenIds()), "spec.prompt_token_ids.ids"),
        (spec(prompt_token_ids=pb.TokenIds(ids=[1, 512])), "spec.prompt_token_ids.ids[1]"),
        (spec(prompt_token_ids=pb.TokenIds(ids=[(1 << 32) - 1])), "spec.prompt_token_ids.ids[0]"),
        (pb.GenerationSpec(chat=pb.ChatPrompt()), "spec.chat.messages"),
        (pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])), "spec.chat.messages[0].role"),
        (pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="r" * 65)])), "spec.chat.messages[0].role"),
        (pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 1025)), "spec.chat.messages"),
        (spec(request_id="x" * 129), "spec.request_id"),
        (spec(request_id="a b"), "spec.request_id"),
        (spec(request_id="a\nb"), "spec.request_id"),
        (spec(request_id="é"), "spec.request_id"),
        (stopping(max_output_tokens=0), "spec.stopping.max_output_tokens"),
        (stopping(max_output_tokens=(1 << 32) - 1), "spec.stopping.max_output_tokens"),
        (stopping(max_output_tokens=3, min_output_tokens=4), "spec.stopping.min_output_tokens"),
        (stopping(min_output_tokens=1 << 31), "spec.stopping.min_output_tokens"),
        (stopping(stop_texts=[""]), "spec.stopping.stop_texts[0]"),
        (stopping(stop_texts=["ok", "x" * 1025]), "spec.stopping.stop_texts[1]"),
        (stopping(stop_texts=["x"] * 17), "spec.stopping.stop_texts"),
        (stopping(stop_token_ids=[3, 512]), "spec.stopping.stop_token_ids[1]"),
        (stopping(stop_token_ids=[3] * 129), "spec.stopping.stop_token_ids"),
        (bias((1, 0.5), (512, 1)), "spec.sampling.logit_bias[1].token_id"),
        (bias((1, 0.5), (1, 1)), "spec.sampling.logit_bias[1].token_id"),
        (bias((1, math.nan)), "spec.sampling.logit_bias[0].bias"),
        (bias((1, -math.inf)), "spec.sampling.logit_bias[0].bias"),
        (bias((1, 100.5)), "spec.sampling.logit_bias[0].bias"),
        (bias(*[(i, 1.0) for i in range(100_000)]), "spec.sampling.logit_bias"),
        (sampling(allowed_token_ids=pb.TokenIds()), "spec.sampling.allowed_token_ids.ids"),
        (sampling(allowed_token_ids=pb.TokenIds(ids=[1, 512])), "spec.sampling.allowed_token_ids.ids[1]"),
        (sampling(allowed_token_ids=pb.TokenIds(ids=[1, 1])), "spec.sampling.allowed_token_ids.ids[1]"),
        (sampling(allowed_token_ids=pb.TokenIds(ids=range(9000))), "spec.sampling.allowed_token_ids.ids"),
        (sampling(bad_words=["ok", ""]), "spec.sampling.bad_words[1]"),
        (sampling(bad_words=["w"] * 129), "spec.sampling.bad_words"),
        (sampling(bad_token_sequences=[pb.TokenIds()]), "spec.sampling.bad_token_sequences[0].ids"),
        (sampling(bad_token_sequences=[pb.TokenIds(ids=[1, 512])]), "spec.sampling.bad_token_sequences[0].ids[1]"),
        (sampling(bad_token_sequences=[pb.TokenIds(ids=[1] * 17)]), "spec.sampling.bad_token_sequences[0].ids"),
        (spec(output=pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=21))), "spec.output.logprobs.top_n"),
        (spec(output=pb.OutputOptions(prompt_logprobs=pb.LogprobsOptions(top_n=1 << 31))), "spec.output.prompt_logprobs.top_n"),
        (spec(output=pb.OutputOptions(logprobs=pb.LogprobsOptions(max_positions=1))), "spec.output.logprobs.max_positions"),
        (spec(output=pb.OutputOptions(prompt_logprobs=pb.LogprobsOptions(max_positions=0))), "spec.output.prompt_logprobs.max_positions"),
        (spec(labels={str(i): "" for i in range(17)}), "spec.labels"),
        (spec(labels={"k" * 65: ""}), "spec.labels[65 characters]"),
        (spec(labels={"": ""}), "spec.labels['']"),
        (spec(labels={"a b": ""}), "spec.labels['a b']"),
        (spec(labels={"a": "x" * 513}), "spec.labels['a']"),
        (spec(labels={"a": "x\ny"}), "spec.labels['a']"),
        (spec(truncate=9), "spec.truncate"),
        (spec(cache=pb.CacheOptions(cache_scope="s" * 129)), "spec.cache.cache_scope"),
        (stopping(time_budget={"seconds": 0}), "spec.stopping.time_budget"),
        (stopping(time_budget={"seconds": -1}), "spec.stopping.time_budget"),
        (stopping(time_budget={"seconds": 1, "nanos": 1 << 30}), "spec.stopping.time_budget"),
        (spec(scheduling=pb.SchedulingOptions(max_queue_time={"seconds": 1 << 40})), "spec.scheduling.max_queue_time"),
    ],
)
def test_a_bad_field_is_named_by_its_path(message: pb.GenerationSpec, path: str) -> None:
    assert list(violations(message)) == [path]


@pytest.mark.parametrize(("wrong", "named", "more"), [
    ([3, 5], [3, 5], ""), (range(8), range(8), ""), (range(2, 40), range(2, 10), "30 more"),
])  # fmt: skip
def test_every_wrong_token_id_is_named_or_counted(wrong: Sequence[int], named: Sequence[int], more: str) -> None:
    ids = [512 if at in wrong else 511 for at in range(40)]
    banned = pb.SamplingOptions(bad_token_sequences=[{"ids": [512] * 9}] * 5)
    found = violations(spec(prompt_token_ids=pb.TokenIds(ids=ids), sampling=banned))
    path = "spec.prompt_token_ids.ids"
    assert [field for field in found if field.startswith(path)] == [f"{path}[{at}]" for at in named]
    assert more in found[f"{path}[{named[-1]}]"] and bool(more) == ("more" in found[f"{path}[{named[-1]}]"])
    assert {f"spec.sampling.bad_token_sequences[{i}].ids[0]" for i in range(5)} <= set(found) and len(found) <= 8 + 5


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerationSpec(prompt_text=" "),
        pb.GenerationSpec(prompt_text="\x00\u202e🙂"),
        spec(request_id="x" * 128),
        spec(labels={f"Aa0_-./{i:057}": "é" * 512 for i in range(16)}, truncate=pb.TRUNCATE_END),
        bias((0, -100.0), (511, 100.0)),
        sampling(allowed_token_ids=pb.TokenIds(ids=range(512))),
        sampling(bad_words=["w" * 1024] * 64, bad_token_sequences=[pb.TokenIds(ids=[511] * 16)] * 64),
        spec(output=pb.OutputOptions(logprobs=pb.LogprobsOptions(top_n=20), prompt_logprobs=pb.LogprobsOptions())),
        stopping(max_output_tokens=255),
        stopping(max_output_tokens=4, min_output_tokens=4),
        stopping(stop_texts=["x" * 1024] * 16, stop_token_ids=[511] * 128),
        stopping(time_budget={"nanos": 1}),
        spec(cache=pb.CacheOptions(cache_scope="s" * 128)),
        spec(scheduling=pb.SchedulingOptions(max_queue_time={"seconds": 7 * 24 * 3600})),
    ],
)
def test_values_at_their_limits_pass(message: pb.GenerationSpec) -> None:
    assert violations(message) == {}


def test_every_violation_of_a_request_is_listed_with_limit_and_value() -> None:
    message = sampling(temperature=math.nan, top_p=2.0, top_k=600)
    message.stopping.max_output_tokens = 0
    found = violations(message)
    assert set(found) == {f"spec.sampling.{f}" for f in ("temperature", "top_p", "top_k")} | {"spec.stopping.max_output_tokens"}
    assert found["spec.sampling.top_k"] == "must be 0 to 512, not 600"


def test_durations_become_milliseconds_and_are_never_rounded_to_nothing() -> None:
    checked = check_spec(stopping(time_budget={"seconds": 2, "nanos": 5_000_000}), SamplingDefaults(), 7, LIMITS)
    assert (checked.time_budget_ms, checked.max_queue_ms) == (2005, -1)
    assert check_spec(stopping(time_budget={"nanos": 1}), SamplingDefaults(), 7, LIMITS).time_budget_ms == 1


@pytest.mark.parametrize(
    ("given", "wanted"), [(0, Priority.NORMAL), (1, Priority.BATCH), (2, Priority.NORMAL), (3, Priority.INTERACTIVE)]
)
def test_priorities(given: int, wanted: Priority) -> None:
    assert check_spec(spec(scheduling=pb.SchedulingOptions(priority=given)), SamplingDefaults(), 7, LIMITS).priority == wanted


def lengths(num_prompt: int, limits: Limits = LIMITS, **fields: Any) -> int:
    return check_lengths(check_spec(stopping(**fields), SamplingDefaults(), 7, limits), [1] * num_prompt, limits)


def test_absent_max_output_tokens_means_as_many_as_fit() -> None:
    assert lengths(100) == 156 and lengths(255) == 1


@pytest.mark.parametrize("num_prompt", [256, 257, 2560])
def test_a_prompt_without_room_for_output_is_too_long(num_prompt: int) -> None:
    with pytest.raises(Refusal) as caught:
        lengths(num_prompt)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    assert caught.value.metadata == {"limit": "255", "actual": str(num_prompt)}
    assert caught.value.violations[0].field == "spec.prompt_token_ids"


def test_prompt_and_output_beyond_the_pool_are_refused() -> None:
    small = Limits(**{f: getattr(LIMITS, f) for f in Limits.__slots__} | {"max_pool_tokens": 64})
    assert lengths(60, small, max_output_tokens=4) == 4
    with pytest.raises(Refusal) as caught:
        lengths(60, small, max_output_tokens=5)
    violation = caught.value.violations[0]
    assert violation.field == "spec.stopping.max_output_tokens" and "max_pool_tokens 64" in violation.description


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(Refusal) as caught:
        check_lengths(check_spec(pb.GenerationSpec(prompt_text="x"), SamplingDefaults(), 7, LIMITS), [1, 600], LIMITS)
    assert caught.value.violations[0].field == "spec.prompt_text[1]"


@pytest.mark.parametrize(("seconds", "good"), [(1, True), (60, True), (0.5, False), (61, False), (-1, False)])
def test_progress_interval_range(seconds: float, good: bool) -> None:
    delivery = pb.DeliveryOptions()
    delivery.progress_interval.FromNanoseconds(int(seconds * 1e9))
    if good:
        assert check_delivery(delivery, LIMITS, 300.0).progress_interval_s == seconds
    else:
        with pytest.raises(Refusal):
            check_delivery(delivery, LIMITS, 300.0)
    assert check_delivery(pb.DeliveryOptions(), LIMITS, 300.0).progress_interval_s == 15.0


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("flush_interval", {"flush_interval": Duration(seconds=2)}),
        ("max_tokens_per_event", {"max_tokens_per_event": 0}),
        ("credit_tokens", {"credit_tokens": 0}),
        ("credit_tokens", {"credit_tokens": 65_537}),
        ("detach_grace", {"detach_grace": Duration(seconds=1)}),
        ("detach_grace", {"detach_grace": Duration(seconds=301), "on_disconnect": pb.ON_DISCONNECT_DETACH}),
    ],
)
def test_delivery_that_cannot_be_names_its_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        check_delivery(pb.DeliveryOptions(**options), LIMITS, 300.0)
    assert [violation.field for violation in caught.value.violations] == [f"delivery.{field}"]


def test_an_unknown_priority_is_refused() -> None:
    spec = pb.GenerationSpec(prompt_text="x", scheduling=pb.SchedulingOptions(priority=77))  # type: ignore[arg-type]
    with pytest.raises(Refusal) as caught:
        check_spec(spec, SamplingDefaults(), 7, LIMITS)
    assert caught.value.violations[0].field == "spec.scheduling.priority"


def test_every_published_limit_comes_from_the_table() -> None:
    published = LIMITS.to_proto()
    for field in model_pb2.ModelLimits.DESCRIPTOR.fields:
        assert getattr(published, field.name) == getattr(LIMITS, field.name) != 0


def test_log_probabilities_of_a_long_prompt_are_refused_by_name() -> None:
    limits = dataclasses.replace(LIMITS, max_prompt_logprobs_tokens=8)
    wanted = spec(output=pb.OutputOptions(prompt_logprobs=pb.LogprobsOptions()))
    checked = check_spec(wanted, SamplingDefaults(), 7, limits)
    assert check_lengths(checked, [5] * 8, limits) == 248
    with pytest.raises(Refusal) as caught:
        check_lengths(checked, [5] * 9, limits)
    assert [v.field for v in caught.value.violations] == ["spec.output.prompt_logprobs"]
