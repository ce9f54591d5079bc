"""Public messages out of stream state: events of GenerateStream, and the whole answer of Generate."""

from dataclasses import dataclass, field

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.output_sequence import Output, OutputSequence
from pagecast_scheduler.frontend.prepared_request import PreparedRequest
from pagecast_scheduler.frontend.streams import RequestStream
from pagecast_scheduler.frontend.token_records import Bytes, output_records, prompt_records, raw_bytes
from pagecast_wire.intake import Phase, Progress, Usage
from pagecast_wire.sampling import FinishReason

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
}
"""The finish reasons that are successes; the others end a call with a status."""

_NO_PROGRESS = Progress(key=0, phase=Phase.QUEUED, queue_position=0, prefill_done=0, prefill_total=0, cached_tokens=0)


def effective(request: PreparedRequest) -> pb.EffectiveParameters:
    """The values that are really used."""
    sampling, stop, spec, answer = request.submit.sampling, request.submit.stop, request.spec, request.answer
    return pb.EffectiveParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_output_tokens=stop.max_output_tokens,
        min_output_tokens=stop.min_output_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        num_sequences=request.submit.num_sequences,
        ignore_eos=spec.ignore_eos,
        include_stop_in_output=spec.include_stop,
        skip_special_tokens=spec.skip_special_tokens,
        logprobs_top_n=sampling.num_logprobs if sampling.num_logprobs >= 0 else None,
        prompt_logprobs_top_n=sampling.num_prompt_logprobs if sampling.num_prompt_logprobs >= 0 else None,
        tool_call_format="" if answer.calls is None else answer.calls.name,
        reasoning_format="" if answer.reasoning is None else answer.reasoning.name,
    )


def reason_of(request: PreparedRequest, reason: FinishReason, stop_id: int | None) -> pb.FinishReason.ValueType:
    """The public reason: a constraint ends its sequence with one of the model's own end tokens."""
    constrained = request.submit.sampling.constraint is not None
    if constrained and reason is FinishReason.STOP and stop_id is not None and stop_id not in request.spec.stop_token_ids:
        return pb.FINISH_REASON_CONSTRAINT_COMPLETE
    return _REASONS[reason]


def usage_of(usages: list[Usage]) -> pb.Usage:
    """Usage of one sequence, or of several of one request (the prompt counts once)."""
    return pb.Usage(
        prompt_tokens=usages[0].prompt_tokens,
        cached_prompt_tokens=usages[0].cached_tokens,
        output_tokens=sum([u.output_tokens for u in usages]),
        recomputed_tokens=sum([u.recomputed_tokens for u in usages]),
    )


def timings_of(usages: list[Usage]) -> pb.Timings:
    """Times of a request: the longest of its sequences."""
    timings = pb.Timings()
    longest = map(max, zip(*map(_times_of, usages), strict=True)) if len(usages) > 1 else _times_of(usages[0])
    for message, us in zip((timings.queue, timings.first_token, timings.total, timings.prefill, timings.decode), longest, strict=True):
        message.seconds, message.nanos = us // 1_000_000, us % 1_000_000 * 1000
    return timings


def _times_of(usage: Usage) -> tuple[int, int, int, int, int]:
    """Microseconds of one sequence, in the order in which Timings names them; none is negative."""
    queue, first, total = usage.queue_us, usage.first_token_us, usage.total_us
    return queue, first, total, max(0, first - queue), max(0, total - first) if first else 0


class EventWriter:
    """Turns what a stream has gathered into numbered events."""

    def __init__(
        self, stream: RequestStream, token_bytes: Bytes = None, response: type = pb.GenerateStreamResponse, retention_ms: int = 0
    ) -> None:
        """token_bytes: what each id stands for, for log-probability records. response: the message that carries an event here."""
        self._stream = stream
        self._bytes = token_bytes
        self._response = response
        self._retention_ms = retention_ms
        self.last_seq = 0

    def accepted(self) -> pb.GenerateStreamResponse:
        """The first event."""
        request = self._stream.request
        event = pb.AcceptedEvent(
            request_id=request.request_id,
            model=request.model,
            model_digest=request.model_digest,
            prompt_tokens=request.num_prompt_tokens,
            queue_position=self._stream.queue_position or 0,
            effective=effective(request),
            truncated_prompt_tokens=request.spec.num_truncated,
        )
        if self._retention_ms:
            event.resume_retention.FromMilliseconds(self._retention_ms)
        return self._next(accepted=event)

    def gathered(self, now: float) -> list[pb.GenerateStreamResponse]:
        """Events for everything that is new: tokens, ends of sequences, completion; or the progress event that is due."""
        stream = self._stream
        events = self._prompt()
        for sequence in stream.sequences:
            if sequence.is_reported:
                continue
            while True:
                output = sequence.take(stream.delivery.max_tokens)
                if not output.is_empty:
                    events += self._tokens(sequence.index, output)
                if sequence.is_delivered:
                    break
            if sequence.finished is not None:
                sequence.is_reported = True
                events.append(self._sequence_finished(sequence))
        if all(sequence.is_reported for sequence in stream.sequences):
            events.append(self._completed())
        if stream.is_progress_due:
            stream.is_progress_due = False
            if not events:
                events.append(self._progress(now))
        return events

    def _next(self, **event: object) -> pb.GenerateStreamResponse:
        self.last_seq += 1
        return self._response(event=pb.StreamEvent(seq=self.last_seq, **event))  # type: ignore[arg-type]

    def _prompt(self) -> list[pb.GenerateStreamResponse]:
        """Log-probabilities of prompt tokens that have come."""
        records = self._stream.prompt_records
        if records is None or not records.has_new:
            return []
        parts = prompt_records(records.prompt, records.take(), self._bytes, records.has_origin)
        return [self._next(prompt=pb.PromptEvent(first_position=first, logprobs=made)) for first, made in parts]

    def _tokens(self, index: int, output: Output) -> list[pb.GenerateStreamResponse]:
        spec, parsed = self._stream.request.spec, output.parsed
        ids = output.ids if spec.want_token_ids else ()
        text = parsed.text if spec.want_text else ""
        is_plain = not (output.logprobs or parsed.reasoning or parsed.calls)
        if is_plain and not (ids or text or (spec.want_raw_bytes and output.ids)):
            return []
        count = len(output.ids)
        event = pb.TokensEvent(sequence_index=index, first_token_offset=output.first, token_ids=ids, text=text, num_tokens=count)
        if spec.want_raw_bytes:
            event.raw_bytes = raw_bytes(output.ids, self._bytes)
        if output.logprobs:
            event.logprobs.extend(output_records(output.ids, output.logprobs, self._bytes))
        if spec.want_text and not is_plain:
            event.reasoning_text = parsed.reasoning
            event.tool_calls.extend(parsed.calls)
        return [self._next(tokens=event)]

    def _sequence_finished(self, sequence: OutputSequence) -> pb.GenerateStreamResponse:
        reason, stop_text, stop_id, usage = sequence.result()
        shown = reason_of(self._stream.request, reason, stop_id)
        event = pb.SequenceFinishedEvent(sequence_index=sequence.index, reason=shown, usage=usage_of([usage]))
        if stop_text is not None:
            event.stop_text = stop_text
        elif stop_id is not None:
            event.stop_token_id = stop_id
        return self._next(sequence_finished=event)

    def _completed(self) -> pb.GenerateStreamResponse:
        usages = [sequence.result()[3] for sequence in self._stream.sequences]
        recoveries = max(u.num_recoveries for u in usages)
        return self._next(completed=pb.CompletedEvent(usage=usage_of(usages), timings=timings_of(usages), num_recoveries=recoveries))

    def _progress(self, now: float) -> pb.GenerateStreamResponse:
        stream = self._stream
        known = stream.progress or _NO_PROGRESS
        phase = known.phase if stream.progress else pb.PHASE_QUEUED
        if stream.num_emitted and phase in (pb.PHASE_QUEUED, pb.PHASE_PREFILLING):
            phase = pb.PHASE_DECODING
        if stream.is_stalled:
            phase = pb.PHASE_STALLED
        event = pb.ProgressEvent(
            phase=phase,  # type: ignore[arg-type]
            queue_position=known.queue_position if stream.progress else stream.queue_position or 0,
            prefill_done=known.prefill_done,
            prefill_total=known.prefill_total,
            cached_prompt_tokens=known.cached_tokens,
        )
        event.elapsed.FromMicroseconds(int((now - stream.started) * 1e6))
        return self._next(progress=event)


@dataclass(slots=True)
class _Said:
    """The strings of one sequence in pieces: a message keeps every one that a longer one took the place of, until it is gone itself."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each tool call

    def write(self, shown: pb.GeneratedSequence) -> None:
        shown.text, shown.reasoning_text, shown.raw_bytes = "".join(self.text), "".join(self.reasoning), b"".join(self.raw)
        for call, pieces in zip(shown.tool_calls, self.arguments, strict=True):
            call.arguments = "".join(pieces)


class WholeAnswer:
    """The answer of Generate, written while its output grows, so that little is left to do when that ends."""

    def __init__(self, stream: RequestStream, token_bytes: Bytes = None) -> None:
        """token_bytes: as for EventWriter."""
        self._stream = stream
        self._bytes = token_bytes
        self._response: pb.GenerateResponse | None = None
        self._said: list[_Said] = []

    def gather(self) -> pb.GenerateResponse:
        """Writes what has come since it was last called. Returns what there is so far, without its strings."""
        stream, response = self._stream, self._response
        if response is None:
            response = self._response = self._begun()
        known = stream.prompt_records
        if known is not None and known.has_new:
            for _, records in prompt_records(known.prompt, known.take(), self._bytes, known.has_origin):
                response.prompt_logprobs.extend(records)
        for shown, said, sequence in zip(response.sequences, self._said, stream.sequences, strict=True):
            if not sequence.is_reported:
                _show(shown, said, stream.request, sequence.take(), self._bytes)
                sequence.is_reported = sequence.finished is not None
        return response

    def _begun(self) -> pb.GenerateResponse:
        """What is known before there is any output."""
        request = self._stream.request
        response = pb.GenerateResponse(
            request_id=request.request_id, model=request.model, model_digest=request.model_digest, effective=effective(request)
        )
        response.truncated_prompt_tokens = request.spec.num_truncated
        for sequence in self._stream.sequences:
            response.sequences.add(sequence_index=sequence.index)
            self._said.append(_Said())
        return response

    def finished(self) -> pb.GenerateResponse:
        """The answer, of a stream whose every sequence has ended."""
        response = self.gather()
        usages = []
        for shown, said, sequence in zip(response.sequences, self._said, self._stream.sequences, strict=True):
            said.write(shown)
            reason, stop_text, stop_id, usage = sequence.result()
            usages.append(usage)
            shown.reason = reason_of(self._stream.request, reason, stop_id)
            shown.usage.CopyFrom(usage_of([usage]))
            if stop_text is not None:
                shown.stop_text = stop_text
            elif stop_id is not None:
                shown.stop_token_id = stop_id
        response.usage.CopyFrom(response.sequences[0].usage if len(usages) == 1 else usage_of(usages))
        response.timings.CopyFrom(timings_of(usages))
        response.num_recoveries = max([u.num_recoveries for u in usages])
        return response


def _show(shown: pb.GeneratedSequence, said: _Said, request: PreparedRequest, output: Output, token_bytes: Bytes) -> None:
    """Writes more output of one sequence, as far as it is wanted."""
    spec, parsed = request.spec, output.parsed
    if spec.want_token_ids and output.ids:
        shown.token_ids.extend(output.ids)
    if spec.want_raw_bytes:
        said.raw.append(raw_bytes(output.ids, token_bytes))
    if spec.want_text:
        said.text.append(parsed.text)
        said.reasoning.append(parsed.reasoning)
        for piece in parsed.calls:
            if piece.index == len(shown.tool_calls):
                shown.tool_calls.add(id=piece.id, name=piece.name)
                said.arguments.append([])
            said.arguments[piece.index].append(piece.arguments)
    if output.logprobs:
        shown.logprobs.extend(output_records(output.ids, output.logprobs, token_bytes))


def server_timing(stream: RequestStream) -> str:
    """What the phases of a finished stream cost, in milliseconds, in the format of the Server-Timing header."""
    timings = timings_of([sequence.result()[3] for sequence in stream.sequences])
    phases = {name: getattr(timings, name).ToMicroseconds() / 1000 for name in ("queue", "prefill", "decode", "total")}
    return ", ".join(f"{name};dur={value:g}" for name, value in phases.items())
