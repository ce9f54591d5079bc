"""GenerationService: from a request to a submitted stream, and from a stream to an answer."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc
from pagecast_scheduler.frontend import call_context
from pagecast_scheduler.frontend.answer_parser import AnswerPlan, behind_reasoning, plan_answer
from pagecast_scheduler.frontend.authorizer import allow_model, allow_priority
from pagecast_scheduler.frontend.constraints import constraint_of, constraint_path
from pagecast_scheduler.frontend.delivery import DEFAULT_DELIVERY, Delivery, check_delivery
from pagecast_scheduler.frontend.errors import Reason, Refusal, adapter_unknown, field_violation
from pagecast_scheduler.frontend.events import EventWriter, WholeAnswer, server_timing
from pagecast_scheduler.frontend.limits import Limits
from pagecast_scheduler.frontend.many_requests import ManyRequests, Turn
from pagecast_scheduler.frontend.namespace import derive
from pagecast_scheduler.frontend.prepared_request import PreparedRequest, output_sequences
from pagecast_scheduler.frontend.principals import Principal
from pagecast_scheduler.frontend.resuming import cursors_of, digest_of, pack, unknown_yet, unpack
from pagecast_scheduler.frontend.sampling_rules import check_something_allowed, with_bad_words
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_scheduler.frontend.streams import RequestStream
from pagecast_scheduler.frontend.validation import CheckedSpec, check_answer_size, check_lengths, check_spec, is_request_id, truncated
from pagecast_wire import pack_u32, view_u32
from pagecast_wire.control import Attach, Attached, CancelRequests
from pagecast_wire.intake import Identity, Submit
from pagecast_wire.sampling import SamplingParams, StopRules

log = structlog.get_logger("pagecast.frontend")

NO_ADAPTER = ""
"""Requests run on the model as it is."""
MAX_DEADLINE_MS = 1 << 40


def priority_of(spec: Any, checked: CheckedSpec, call: call_context.Call) -> int:
    """The class of a request: the spec's, else the metadata's, else NORMAL or the caller's highest if that is lower. Raises Refusal."""
    if spec.scheduling.priority:
        wanted = checked.priority
    elif call.priority is not None:
        wanted = call.priority
    else:
        return max(checked.priority, call.principal.max_priority)
    allow_priority(call.principal, wanted)
    return wanted


def checked_request_id(text: str, max_length: int) -> str:
    """The id of a request that is to be found. Raises Refusal for what no request can be called."""
    if not is_request_id(text, max_length):
        raise field_violation("request_id", f"must be 1 to {max_length} printable ASCII characters without spaces")
    return text


def time_left(context: Any) -> float | None:
    """Seconds until a call's deadline, None for one without. gRPC reckons by the wall clock, so a call is asked once, as it begins."""
    left: float | None = context.time_remaining()
    return left


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generate, GenerateMany and GenerateStream; ResumeStream and CancelGeneration of what these began."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._engine = state.engine
        self._engine.rebuild = self._rebuild

    async def Generate(self, request: Any, context: Any) -> pb.GenerateResponse:
        """The whole result in one answer."""
        return await self._whole(request.spec, time_left(context), context)

    async def GenerateMany(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Whole results of requests as they end, in messages of those that are ready together."""
        state = self._state
        if state.is_draining:
            raise Refusal(Reason.DRAINING)
        await ManyRequests(self._whole, time_left(context), context, state.config, state.ending).answer(request)

    async def _whole(self, spec: Any, time_left_s: float | None, context: Any, turn: Turn | None = None) -> pb.GenerateResponse:
        """context: None where headers are not this request's to send. turn: waits until the answer may be finished; absent: at once."""
        prepared = await self._prepare(spec, time_left_s, False)
        check_answer_size(prepared.spec, prepared.num_prompt_tokens, self._state.limits())
        stream = self._open(prepared, False, DEFAULT_DELIVERY)
        answer = WholeAnswer(stream, self._state.prompts.tokenizer.piece_bytes)
        try:
            await self._until_accepted(stream, context)
            while not stream.is_done:
                await stream.wait()
                if not stream.is_done:
                    answer.gather()
            if stream.failure is not None:
                stream.failure.metadata = {**stream.failure.metadata, **stream.usage_so_far()}
                raise stream.failure
            if turn is not None:
                await turn()
            return answer.finished()
        except asyncio.CancelledError:
            if stream.failure is None:
                raise
            raise stream.failure from None
        finally:
            self._finish(stream)

    async def GenerateStream(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Events as they come; errors end the call and tell how far it got."""
        delivery = check_delivery(request.delivery, self._state.limits(), self._state.config.max_detach_grace_s)
        prepared = await self._prepare(request.spec, time_left(context), True)
        await self._answer(self._open(prepared, True, delivery), pb.GenerateStreamResponse, context)

    async def ResumeStream(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Events from the caller's cursors on, of a stream that any front end began."""
        limits = self._state.limits()
        delivery = check_delivery(request.delivery, limits, self._state.config.max_detach_grace_s)
        call = call_context.current()
        call.request_id = checked_request_id(request.request_id, limits.max_request_id_length)
        attach = Attach(0, call.principal.name, call.request_id)
        prepared, sequences = unknown_yet(attach, call.principal)
        stream = RequestStream(prepared, sequences, self._engine.link.send, True, delivery, attach, cursors_of(request))
        self._engine.open(stream, attach)
        await self._answer(stream, pb.ResumeStreamResponse, context)

    async def CancelGeneration(self, request: Any, context: Any) -> pb.CancelGenerationResponse:
        """Ends a request of the same principal, whichever front end it is read through."""
        call = call_context.current()
        request_id = checked_request_id(request.request_id, self._state.limits().max_request_id_length)
        report = await self._engine.ask(CancelRequests(0, (request_id,), call.principal.name))
        if report.cancelled:
            return pb.CancelGenerationResponse(result=pb.CANCEL_RESULT_CANCELLED)
        if report.finished:
            return pb.CancelGenerationResponse(result=pb.CANCEL_RESULT_ALREADY_FINISHED)
        raise Refusal(Reason.REQUEST_UNKNOWN, resource=("pagecast.v1.Request", request_id))

    async def _answer(self, stream: RequestStream, response: type, context: Any) -> None:
        """Writes a whole stream as messages of type `response`."""
        welcome = self._engine.welcome
        retention_ms = welcome.limits.retention_ms if welcome is not None else 0
        writer = EventWriter(stream, self._state.prompts.tokenizer.piece_bytes, response, retention_ms)
        try:
            await self._until_accepted(stream, context)
            await self._write(stream, context, [writer.accepted()])
            await self._deliver(stream, writer, context)
            context.set_trailing_metadata((("server-timing", server_timing(stream)),))
        except asyncio.CancelledError:
            if stream.failure is None:
                stream.leave_grace_ms = round(1000 * stream.delivery.detach_grace_s)
                raise
            raise self._with_progress(stream, writer) from None
        except Refusal:
            raise self._with_progress(stream, writer) from None
        finally:
            self._finish(stream)

    async def _deliver(self, stream: RequestStream, writer: EventWriter, context: Any) -> None:
        """First token at once; afterwards whatever has gathered while the previous write was under way."""
        while not all(sequence.is_reported for sequence in stream.sequences):
            if stream.delivery.flush_interval_s:
                await stream.gather()
            if not stream.has_output():
                await stream.wait()
            if stream.failure is not None:
                raise stream.failure
            await self._write(stream, context, writer.gathered(time.monotonic()))

    async def _write(self, stream: RequestStream, context: Any, events: list[pb.GenerateStreamResponse]) -> None:
        for event in events:
            stream.writing_since = time.monotonic()  # of each: a reader is slow that takes nothing, not one who has much to take
            await context.write(event)
        stream.writing_since = None
        stream.note_delivered()

    async def _until_accepted(self, stream: RequestStream, context: Any) -> None:
        """Waits for admission to the queue; headers go out only then, so that a refusal can be retried elsewhere."""
        stream.attach()
        while stream.queue_position is None and not stream.is_done:
            await stream.wait()
        if stream.failure is not None:
            raise stream.failure
        if context is not None:
            await context.send_initial_metadata((("x-request-id", stream.request.request_id),))

    def _open(self, prepared: PreparedRequest, is_streaming: bool, delivery: Delivery) -> RequestStream:
        """Submits. From here to the handler's `finally` there is no await, so an opened stream is always finished."""
        sequences = output_sequences(prepared, self._state.prompts.tokenizer)
        stream = RequestStream(prepared, sequences, self._engine.link.send, is_streaming, delivery)
        self._engine.open(stream, prepared.submit)
        return stream

    def _rebuild(self, stream: RequestStream, attached: Attached) -> None:
        """The scheduler says that a stream reads a request which was there before."""
        left = attached.submit.deadline_ms
        prepared = unpack(attached, None if left < 0 else time.monotonic() + left / 1000, stream.request.principal)
        stream.on_attached(attached, prepared, output_sequences(prepared, self._state.prompts.tokenizer))

    def _finish(self, stream: RequestStream) -> None:
        self._engine.finish(stream)
        asyncio.get_running_loop().call_soon(self._note_end, stream, time.monotonic() - stream.started)  # behind the answer

    def _note_end(self, stream: RequestStream, elapsed_s: float) -> None:
        # The one line that ties a caller's id to the key that the scheduler's log knows. Counts only, never what was said.
        log.debug(
            "request ended", request_id=stream.request.request_id, key=stream.key, prompt_tokens=stream.request.num_prompt_tokens,
            output_tokens=sum(len(sequence.ids) for sequence in stream.sequences), failure=stream.failure and stream.failure.reason.name,
            is_done=stream.is_done, elapsed_ms=round(1000 * elapsed_s),
        )  # fmt: skip

    async def _prepare(self, spec: Any, time_left_s: float | None, keep: bool) -> PreparedRequest:
        """Checks and tokenizes. keep: others may read the request too, and for a while after its end. Raises Refusal."""
        state = self._state
        if state.is_draining:
            raise Refusal(Reason.DRAINING)
        state.check_model(spec.model)
        if spec.adapter:
            raise adapter_unknown(spec.adapter)
        limits = state.limits()
        ceiling = state.config.max_request_s
        deadline = time.monotonic() + (ceiling if time_left_s is None else min(time_left_s, ceiling))
        checked = check_spec(spec, state.prompts.tokenizer.defaults, secrets.randbits(64), limits)
        call = call_context.current()
        allow_model(call.principal, state.model_name)
        priority = priority_of(spec, checked, call)
        if priority != checked.priority:
            checked = msgspec.structs.replace(checked, priority=priority)
        request_id = call.request_id = spec.request_id or call.request_id or secrets.token_hex(16)
        checked, prompt, answer = await self._tokens_of(spec, checked, limits)
        max_output_tokens = check_lengths(checked, prompt, limits)
        welcome = state.engine.welcome
        digest = welcome.model.digest if welcome is not None else ""
        view = pack(state.model_name, digest, checked, answer)
        labels = call.labels = tuple(sorted(spec.labels.items())) if spec.labels else ()
        identity = Identity(call.principal.name, request_id, digest_of(spec), view, spec.attach, keep, labels)
        submit = self._submit(checked, prompt, max_output_tokens, deadline, call.principal, identity)
        return PreparedRequest(request_id, state.model_name, digest, checked, submit, len(prompt), deadline, call.principal, answer)

    async def _tokens_of(self, spec: Any, checked: CheckedSpec, limits: Limits) -> tuple[CheckedSpec, Sequence[int], AnswerPlan]:
        """What needs the tokenizer or a compiler: bad words and the constraint, the prompt, and how the answer is read."""
        state = self._state
        sampling = self._with_bad_words(checked, limits)
        asked = constraint_of(spec, limits)
        if checked.want_raw_bytes and state.prompts.tokenizer.piece_bytes is None:
            raise Refusal(Reason.FEATURE_DISABLED, message="the model's tokenizer has no bytes for single tokens")
        prompt, rendered = await state.prompts.prompt_ids(spec, None if checked.truncate else limits)
        checked, prompt = truncated(checked, prompt, limits)
        template = state.prompts.tokenizer.chat_template
        answer = plan_answer(spec, checked.parse_reasoning, checked.parse_tool_calls, template, rendered)
        constraint = await state.constraints.check(behind_reasoning(asked, answer, rendered), constraint_path(spec))
        if constraint is not None:
            sampling = msgspec.structs.replace(sampling, constraint=constraint)
        return checked if sampling is checked.sampling else msgspec.structs.replace(checked, sampling=sampling), prompt, answer

    def _own_ends(self, checked: CheckedSpec) -> Sequence[int]:
        """End tokens of the model that end this request. Under a constraint they are what says that it is complete."""
        welcome = self._engine.welcome
        is_ignored = checked.ignore_eos and checked.sampling.constraint is None
        return () if is_ignored or welcome is None else welcome.model.eos_token_ids

    def _with_bad_words(self, checked: CheckedSpec, limits: Limits) -> SamplingParams:
        """Sampling values with the bad words as tokens. Raises Refusal where the rules leave no first token."""
        if not (checked.bad_words or checked.bad_token_sequences or checked.sampling.allowed_token_ids):
            return checked.sampling
        ways = [self._state.prompts.ways_to_write(word) for word in checked.bad_words]
        sampling = with_bad_words(checked.sampling, ways, [list(ids) for ids in checked.bad_token_sequences], limits)
        sequences = [*checked.bad_token_sequences, *(ids for way in ways for ids in way)]
        banned = {ids[0] for ids in sequences if len(ids) == 1}
        if checked.min_output_tokens:
            banned |= {*self._own_ends(checked), *checked.stop_token_ids}
        check_something_allowed([int(i) for i in view_u32(sampling.allowed_token_ids)], banned)
        return sampling

    def _submit(
        self, checked: CheckedSpec, prompt: Sequence[int], max_output_tokens: int, deadline: float | None, principal: Principal,
        identity: Identity,
    ) -> Submit:
        """The wire message of a request, without its key."""
        welcome = self._engine.welcome
        assert welcome is not None
        ends = self._own_ends(checked)
        deadline_ms = -1 if deadline is None else max(0, min(MAX_DEADLINE_MS, int((deadline - time.monotonic()) * 1000)))
        return Submit(
            key=0,
            prompt=pack_u32(prompt),
            sampling=checked.sampling,
            stop=StopRules(
                max_output_tokens=max_output_tokens,
                min_output_tokens=checked.min_output_tokens,
                stop_token_ids=pack_u32(sorted({*ends, *checked.stop_token_ids})) if ends or checked.stop_token_ids else b"",
            ),
            cache_namespace=derive(self._state.namespace_key, principal.name, welcome.model.digest, NO_ADAPTER, checked.cache_scope),
            tenant=principal.tenant,
            num_sequences=checked.num_sequences,
            priority=checked.priority,
            deadline_ms=deadline_ms,
            time_budget_ms=checked.time_budget_ms,
            max_queue_ms=checked.max_queue_ms,
            bypass_prefix_cache=checked.bypass_prefix_cache or checked.sampling.num_prompt_logprobs >= 0,
            identity=identity,
        )

    def _with_progress(self, stream: RequestStream, writer: EventWriter) -> Refusal:
        """The stream's failure, telling what the caller has: emitted_tokens is the billing truth, the rest is usage as it stands; and
        whether the request goes on for somebody to resume it."""
        failure = stream.failure
        assert failure is not None
        if failure.reason is Reason.DRAIN_TIMEOUT and self._engine.welcome is not None:
            stream.leave_grace_ms = self._engine.welcome.limits.front_end_grace_ms
        elif failure.reason is Reason.SLOW_CONSUMER:
            stream.leave_grace_ms = round(1000 * stream.delivery.detach_grace_s)
        failure.metadata = {
            **failure.metadata,
            **stream.usage_so_far(),
            "request_id": stream.request.request_id,
            "emitted_tokens": str(stream.num_emitted),
            "last_seq": str(writer.last_seq),
            "resumable": "true" if stream.leave_grace_ms else "false",
        }
        return failure
