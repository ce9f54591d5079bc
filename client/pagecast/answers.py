"""Turns the API's answer messages into this package's values."""

from collections.abc import Collection

from google.protobuf.duration_pb2 import Duration

from pagecast import types
from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import model_pb2, runtime_pb2, tokenizer_pb2

_REASONS: dict[int, types.FinishReason] = {1: "stop", 2: "length", 3: "time_limit", 4: "constraint_complete"}
PHASES: dict[int, types.Phase] = {1: "queued", 2: "prefilling", 3: "decoding", 4: "paused_slow_consumer", 5: "recovering", 6: "stalled"}
PRIORITIES: dict[int, types.Priority] = {1: "batch", 2: "normal", 3: "interactive"}
_STATES: dict[int, types.ServingState] = {1: "starting", 2: "serving", 3: "recovering", 4: "stalled", 5: "draining"}


def event(message: pb.StreamEvent) -> types.Event | None:
    """The event as a value; None for a kind that this version does not know, which a client is to pass over."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        new = message.tokens
        calls = tuple(types.ToolCallDelta(c.index, c.id, c.name, c.arguments) for c in new.tool_calls)
        return types.Tokens(
            message.seq, new.sequence_index, new.first_token_offset, tuple(new.token_ids), new.text, logprobs(new.logprobs),
            new.reasoning_text, calls, new.raw_bytes,
        )
    if kind == "accepted":
        got = message.accepted
        return types.Accepted(
            message.seq, got.request_id, got.model, got.model_digest, got.prompt_tokens, got.queue_position, effective(got.effective),
            got.truncated_prompt_tokens,
        )
    if kind == "progress":
        now = message.progress
        return types.Progress(
            message.seq, PHASES.get(now.phase, "unspecified"), now.queue_position, now.prefill_done, now.prefill_total,
            now.cached_prompt_tokens, seconds(now.elapsed),
        )
    if kind == "sequence_finished":
        end = message.sequence_finished
        reason = _REASONS.get(end.reason, "unspecified")
        return types.SequenceFinished(message.seq, end.sequence_index, reason, matched(end), usage(end.usage))
    if kind == "prompt":
        return types.PromptLogprobs(message.seq, message.prompt.first_position, logprobs(message.prompt.logprobs))
    if kind == "completed":
        done = message.completed
        return types.Completed(message.seq, usage(done.usage), timings(done.timings), done.num_recoveries)
    return None


def generation(message: pb.GenerateResponse) -> types.Generation:
    """A whole result."""
    return types.Generation(
        message.request_id, message.model, message.model_digest, effective(message.effective), tuple(map(sequence, message.sequences)),
        usage(message.usage), timings(message.timings), message.num_recoveries, logprobs(message.prompt_logprobs),
        message.truncated_prompt_tokens,
    )


def sequence(message: pb.GeneratedSequence) -> types.Sequence:
    """One whole output."""
    calls = tuple(types.ToolCall(c.id, c.name, c.arguments) for c in message.tool_calls) if message.tool_calls else ()
    return types.Sequence(
        message.sequence_index, message.text, tuple(message.token_ids[:]), _REASONS.get(message.reason, "unspecified"), matched(message),
        usage(message.usage), logprobs(message.logprobs), message.reasoning_text, calls, message.raw_bytes,
    )


def logprobs(messages: Collection[pb.TokenLogprob]) -> tuple[types.TokenLogprob, ...]:
    """Log-probability records."""
    if not messages:
        return ()
    return tuple(
        types.TokenLogprob(
            m.token_id, m.logprob if m.HasField("logprob") else None,
            tuple(types.Alternative(t.token_id, t.logprob, t.token_bytes) for t in m.top), m.token_bytes,
        )
        for m in messages
    )


def effective(message: pb.EffectiveParameters) -> types.Effective:
    """The values that a request really runs with; None for log-probabilities that nobody asked for."""
    return types.Effective(
        message.temperature, message.top_k, message.top_p, message.min_p, message.seed, message.max_output_tokens,
        message.min_output_tokens, message.presence_penalty, message.frequency_penalty, message.repetition_penalty, message.num_sequences,
        message.ignore_eos, message.include_stop_in_output, message.skip_special_tokens,
        message.logprobs_top_n if message.HasField("logprobs_top_n") else None,
        message.prompt_logprobs_top_n if message.HasField("prompt_logprobs_top_n") else None,
        message.tool_call_format, message.reasoning_format,
    )


def usage(message: pb.Usage) -> types.Usage:
    """Tokens of a request, or of one of its sequences."""
    return types.Usage(message.prompt_tokens, message.cached_prompt_tokens, message.output_tokens, message.recomputed_tokens)


def timings(message: pb.Timings) -> types.Timings:
    """Where the time of a request went, in seconds."""
    return types.Timings(seconds(message.queue), seconds(message.first_token), seconds(message.total))


def matched(message: pb.SequenceFinishedEvent | pb.GeneratedSequence) -> str | int | None:
    """The stop text or stop token id that ended a sequence."""
    kind = message.WhichOneof("matched_stop")
    if kind is None:
        return None
    return message.stop_text if kind == "stop_text" else message.stop_token_id


def seconds(message: Duration) -> float:
    """A protobuf Duration in seconds."""
    return message.seconds + message.nanos / 1e9


def model(message: model_pb2.Model) -> types.Model:
    """A served model with its limits."""
    known = message.capabilities
    limits = types.Limits(**{name: getattr(message.limits, name) for name in types.Limits.__dataclass_fields__})
    return types.Model(
        message.name, message.architecture, message.digest, message.dtype, message.num_parameters, message.vocab_size,
        message.kv_bytes_per_token, message.quantization, tuple(message.end_token_ids), limits,
        known.chat if known.HasField("chat") else None, known.prefix_cache if known.HasField("prefix_cache") else None,
        tuple(known.constraints), known.tool_call_format if known.HasField("tool_call_format") else None,
        known.reasoning_format if known.HasField("reasoning_format") else None, message.tokenizer_digest,
    )


def rendered_chat(message: tokenizer_pb2.RenderChatResponse) -> types.RenderedChat:
    """A conversation under the model's template."""
    return types.RenderedChat(message.text, tuple(message.token_ids))


def server_info(message: runtime_pb2.GetServerInfoResponse) -> types.ServerInfo:
    """Which server answered."""
    return types.ServerInfo(message.version, message.instance_id, message.epoch)


def load(message: runtime_pb2.GetLoadResponse) -> types.Load:
    """How busy an instance is."""
    values = {name: getattr(message, name) for name in types.Load.__dataclass_fields__ if name != "state"}
    return types.Load(state=_STATES.get(message.state, "unspecified"), **values)


def watched_load(message: runtime_pb2.WatchLoadResponse) -> types.Load:
    """The load that a watch tells."""
    return load(message.load)


def cache_events(message: runtime_pb2.WatchCacheEventsResponse) -> types.CacheEvents:
    """What has changed in a prefix cache."""
    stored = tuple(types.CachedBlock(block.hash, block.parent_hash, tuple(block.token_ids)) for block in message.stored)
    return types.CacheEvents(
        message.instance_id, message.epoch, message.sequence, message.snapshot, message.snapshot_continues, message.cleared,
        tuple(message.removed_hashes), stored, message.block_size,
    )
