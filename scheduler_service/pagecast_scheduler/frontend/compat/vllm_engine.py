"""vLLM's gRPC engine protocol over GenerationService: for routers that pick and feed engines by it."""

import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from pagecast.v1 import generation_pb2 as ours
from pagecast_scheduler.frontend.compat import vllm_engine_pb2 as pb
from pagecast_scheduler.frontend.compat import vllm_engine_pb2_grpc
from pagecast_scheduler.frontend.compat.inner_call import InnerCall
from pagecast_scheduler.frontend.errors import Reason, Refusal, field_violation
from pagecast_scheduler.frontend.generation import GenerationServicer
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_wire.intake import ServingState

_REASONS = {ours.FINISH_REASON_LENGTH: "length", ours.FINISH_REASON_TIME_LIMIT: "length"}


def spec_of(request: pb.GenerateRequest) -> ours.GenerationSpec:
    """What is asked for, in our terms. Raises Refusal, naming the field, for what we do not do."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise field_violation("input", "must be tokenized or text")
    if request.HasField("mm_inputs") or request.extra_mm_inputs:
        raise field_violation("mm_inputs", "images, audio and video are not supported")
    spec = ours.GenerationSpec(request_id=request.request_id)
    if kind == "text":
        spec.prompt_text = request.text
    else:
        spec.prompt_token_ids.ids.extend(request.tokenized.input_ids)
        spec.prompt_token_ids.SetInParent()
    _fill_sampling(spec, request.sampling_params)
    _fill_stopping(spec, request.sampling_params)
    spec.output.text = False  # the router has the text; stop texts are still looked for
    return spec


def _fill_sampling(spec: ours.GenerationSpec, params: pb.SamplingParams) -> None:
    sampling = spec.sampling
    # Whoever speaks this protocol has settled the defaults: what is not given is off, not the model's own.
    sampling.temperature = params.temperature if params.HasField("temperature") else 1.0
    sampling.top_p = params.top_p or 1.0
    sampling.top_k = params.top_k
    sampling.min_p = params.min_p
    sampling.presence_penalty = params.presence_penalty
    sampling.frequency_penalty = params.frequency_penalty
    sampling.repetition_penalty = params.repetition_penalty or 1.0
    sampling.num_sequences = params.n or 1
    if params.HasField("seed"):
        sampling.seed = params.seed % (1 << 64)
    for token_id, bias in sorted(params.logit_bias.items()):
        if token_id < 0:
            raise field_violation("sampling_params.logit_bias", "must have token ids as keys")
        sampling.logit_bias.add(token_id=token_id, bias=bias)
    _fill_constraint(spec, params)


def _fill_constraint(spec: ours.GenerationSpec, params: pb.SamplingParams) -> None:
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return
    if kind == "structural_tag":
        raise field_violation("sampling_params.structural_tag", "is not supported")
    if kind == "json_object":
        spec.constraint.json_object.SetInParent()
    elif kind == "choice":
        spec.constraint.choices.texts.extend(params.choice.choices)
        spec.constraint.choices.SetInParent()
    else:
        setattr(spec.constraint, kind, getattr(params, kind))


def _fill_stopping(spec: ours.GenerationSpec, params: pb.SamplingParams) -> None:
    if params.HasField("truncate_prompt_tokens"):
        raise field_violation("sampling_params.truncate_prompt_tokens", "is not supported: a prompt is never cut")
    stopping = spec.stopping
    if params.HasField("max_tokens"):
        stopping.max_output_tokens = params.max_tokens
    stopping.min_output_tokens = params.min_tokens
    stopping.stop_texts.extend(params.stop)
    stopping.stop_token_ids.extend(params.stop_token_ids)
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop_in_output = params.include_stop_str_in_output
    for name in ("logprobs", "prompt_logprobs"):
        if not params.HasField(name):
            continue
        if getattr(params, name) < 0:
            raise field_violation(f"sampling_params.{name}", "must be a number of tokens; all of them are not supported")
        getattr(spec.output, name).top_n = getattr(params, name)
        getattr(spec.output, name).SetInParent()


class _Outputs:
    """Builds the protocol's messages from our events."""

    def __init__(self, wants_chunks: bool) -> None:
        self._wants_chunks = wants_chunks
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._prompt = pb.InputLogProbs()
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, pb.OutputLogProbs] = {}

    def take(self, event: ours.StreamEvent) -> pb.GenerateResponse | None:
        """What one event becomes; None for nothing."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._prompt_tokens = event.accepted.prompt_tokens
        elif kind == "progress":
            self._cached_tokens = event.progress.cached_prompt_tokens
        elif kind == "prompt":
            for record in event.prompt.logprobs:
                _add_input(self._prompt, record)
        elif kind == "tokens":
            return self._tokens(event.tokens)
        elif kind == "sequence_finished":
            return pb.GenerateResponse(complete=self._complete(event.sequence_finished))
        return None

    def _tokens(self, event: ours.TokensEvent) -> pb.GenerateResponse | None:
        index = event.sequence_index
        is_first = index not in self._ids
        ids = self._ids.setdefault(index, [])
        ids.extend(event.token_ids)
        fresh = pb.OutputLogProbs()
        for record in event.logprobs:
            _add_output(fresh, record)
        if event.logprobs:
            self._logprobs.setdefault(index, pb.OutputLogProbs()).MergeFrom(fresh)
        if not self._wants_chunks or not event.token_ids:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=event.token_ids, prompt_tokens=self._prompt_tokens, completion_tokens=len(ids), cached_tokens=self._cached_tokens,
            index=index, output_logprobs=fresh if event.logprobs else None,
            input_logprobs=self._prompt if is_first and self._prompt.token_ids else None,
        )
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, end: ours.SequenceFinishedEvent) -> pb.GenerateComplete:
        index = end.sequence_index
        made = pb.GenerateComplete(
            output_ids=self._ids.get(index, []), finish_reason=_REASONS.get(end.reason, "stop"), prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.output_tokens, cached_tokens=end.usage.cached_prompt_tokens, index=index,
            output_logprobs=self._logprobs.get(index), input_logprobs=self._prompt if self._prompt.token_ids else None,
        )
        matched = end.WhichOneof("matched_stop")
        if matched == "stop_text":
            made.matched_stop_str = end.stop_text
        elif matched == "stop_token_id":
            made.matched_token_id = end.stop_token_id
        return made


def _add_output(into: pb.OutputLogProbs, record: ours.TokenLogprob) -> None:
    into.token_ids.append(record.token_id)
    into.token_logprobs.append(record.logprob)
    into.top_logprobs.add(values=[one.logprob for one in record.top], token_ids=[one.token_id for one in record.top])


def _add_input(into: pb.InputLogProbs, record: ours.TokenLogprob) -> None:
    into.token_ids.append(record.token_id)
    into.token_logprobs.add(value=record.logprob if record.HasField("logprob") else None)
    into.top_logprobs.add(values=[one.logprob for one in record.top], token_ids=[one.token_id for one in record.top])


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Generate, Abort, HealthCheck and the three questions about the engine."""

    def __init__(self, state: ServiceState, generation: GenerationServicer) -> None:
        self._state = state
        self._generation = generation
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Chunks, if asked for, and one complete message for each sequence."""
        if request.HasField("data_parallel_rank") and request.data_parallel_rank > 0:
            raise field_violation("data_parallel_rank", f"must be 0: there is one engine, not {request.data_parallel_rank}")
        outputs = _Outputs(request.stream)

        async def deliver(message: ours.GenerateStreamResponse) -> None:
            made = outputs.take(message.event)
            if made is not None:
                await context.write(made)

        inner = ours.GenerateStreamRequest(spec=spec_of(request))
        await self._generation.GenerateStream(inner, InnerCall(context, deliver))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends requests of the same caller; ids that are not known (any more) are passed over."""
        for request_id in request.request_ids:
            try:
                await self._generation.CancelGeneration(ours.CancelGenerationRequest(request_id=request_id), context)
            except Refusal as refusal:
                if refusal.reason is not Reason.REQUEST_UNKNOWN:
                    raise
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        state = self._state.serving_state
        return pb.HealthCheckResponse(healthy=state is ServingState.SERVING, message=state.name)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        welcome, limits = self._state.engine.welcome, self._state.limits()
        assert welcome is not None  # limits() would have refused
        return pb.GetModelInfoResponse(
            model_path=self._state.model_name, served_model_name=self._state.model_name, is_generation=True,
            max_context_length=limits.max_request_tokens, max_req_input_len=limits.max_request_tokens - 1, vocab_size=limits.vocab_size,
            architectures=[welcome.model.architecture], eos_token_ids=welcome.model.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        welcome, limits = self._state.engine.welcome, self._state.limits()
        assert welcome is not None
        return pb.GetServerInfoResponse(
            active_requests=len(self._state.engine.calls), is_paused=self._state.is_draining,
            uptime_seconds=time.monotonic() - self._started,
            server_type="pagecast", data_parallel_size=1, block_size=limits.block_size, model_dtype=welcome.model.dtype,
            max_num_seqs=limits.max_num_seqs,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        """The one engine's load. Raises Refusal for a rank that is not there."""
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise field_violation("dp_rank", f"must be 0: there is one engine, not {request.dp_rank}")
        limits, status = self._state.limits(), self._state.engine.status
        if status is None:
            raise Refusal(Reason.STARTING)
        used = status.num_blocks_referenced
        share = used / max(1, status.num_blocks)
        load = pb.SchedulerLoad(
            num_running_reqs=status.num_running, num_waiting_reqs=status.num_waiting,
            num_total_reqs=status.num_running + status.num_waiting,
            num_used_tokens=used * limits.block_size, max_total_num_tokens=limits.max_pool_tokens, token_usage=share, utilization=share,
            cache_hit_rate=status.prefix_tokens_hit / max(1, status.prefix_tokens_asked), max_running_requests=limits.max_num_seqs,
        )
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return pb.GetLoadsResponse(timestamp=now, version=metadata.version("pagecast"), dp_rank_count=1, loads=[load])
