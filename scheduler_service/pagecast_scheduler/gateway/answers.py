"""From the gRPC API's answers to OpenAI's response bodies and chunks. Pure: messages in, dictionaries out."""

import codecs
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pagecast.v1 import generation_pb2 as pb

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TIME_LIMIT: "length",
    pb.FINISH_REASON_CONSTRAINT_COMPLETE: "stop",
}
"""OpenAI has no word for a time budget; what matters to its clients is that the answer was cut."""


def finish_reason(reason: int, has_tool_calls: bool) -> str:
    """A call of a tool that ended by itself is "tool_calls"."""
    word = _REASONS.get(reason, "stop")
    return "tool_calls" if has_tool_calls and word == "stop" else word


def stop_reason(message: Any) -> str | int | None:
    """What matched, as vLLM's servers tell it: the stop text or the token id."""
    kind = message.WhichOneof("matched_stop")
    return None if kind is None else getattr(message, kind)


def usage(total: Iterable[pb.Usage]) -> dict[str, Any]:
    """The usage object of a response, over the prompts of a request."""
    prompt = cached = output = 0
    for each in total:
        prompt, cached, output = prompt + each.prompt_tokens, cached + each.cached_prompt_tokens, output + each.output_tokens
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _shown(token_bytes: bytes) -> str:
    return token_bytes.decode(errors="replace")


def _entry(record: Any) -> dict[str, Any]:
    return {"token": _shown(record.token_bytes), "logprob": record.logprob, "bytes": list(record.token_bytes)}


def chat_logprobs(records: Sequence[pb.TokenLogprob]) -> dict[str, Any] | None:
    """The logprobs object of a chat choice; None where none were asked for."""
    if not records:
        return None
    return {"content": [_entry(record) | {"top_logprobs": [_entry(one) for one in record.top]} for record in records], "refusal": None}


class Echo:
    """A prompt as its choices repeat it: its text, its tokens' log-probabilities, and the names of its special tokens by their ids."""

    def __init__(self, text: str = "", records: Iterable[pb.TokenLogprob] = (), names: Mapping[int, str] = MappingProxyType({})) -> None:
        self.text, self.records, self.names = text, list(records), names


class TextLogprobs:
    """The logprobs objects of one choice of a completion, piece by piece: knows where in the choice's text its next token begins.

    The bytes of an unfinished character count with the token that ends it. A special token of the prompt is shown where its name
    stands in the text, and empty elsewhere. A space that a tokenizer puts before a text counts for nothing."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._offset = 0 if echo.records else len(echo.text)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self) -> dict[str, Any] | None:
        """Of the tokens that are repeated; None where none were asked for."""
        return self.of(self._echo.records)

    def of(self, records: Sequence[pb.TokenLogprob]) -> dict[str, Any] | None:
        """Of the next tokens; None where none were asked for."""
        if not records:
            return None
        tokens, tops, offsets = [], [], []
        for record in records:
            offsets.append(self._offset)
            tokens.append(self._shown(record))
            tops.append({self._shown(one): one.logprob for one in reversed(record.top)} or None)  # of equals the likeliest is told
            text = self._characters.decode(record.token_bytes) if record.token_bytes else tokens[-1]
            self._offset += len(text) - (self._offset == 0 and text[:1] == " " and self._echo.text[:1] not in ("", " "))
        values = [record.logprob if record.HasField("logprob") else None for record in records]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _shown(self, record: pb.TokenLogprob | pb.AlternativeToken) -> str:
        name = "" if record.token_bytes else self._echo.names.get(record.token_id, "")
        return name if name and self._echo.text.startswith(name, self._offset) else _shown(record.token_bytes)


def joined(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two logprobs objects of one choice as one."""
    if one is None or other is None:
        return other if one is None else one
    return {key: one[key] + other[key] for key in one}


def without_output(answer: pb.GenerateResponse) -> pb.GenerateResponse:
    """An answer of which the prompt alone was wanted."""
    answer.usage.output_tokens = 0
    ends = [pb.GeneratedSequence(sequence_index=one.sequence_index, reason=pb.FINISH_REASON_LENGTH) for one in answer.sequences]
    del answer.sequences[:]
    answer.sequences.extend(ends)
    return answer


async def events_without_output(events: AsyncIterable[pb.StreamEvent]) -> AsyncIterator[pb.StreamEvent]:
    """The same, of a stream. Raises RpcError."""
    async for event in events:
        kind = event.WhichOneof("event")
        if kind == "sequence_finished":
            end = pb.SequenceFinishedEvent(sequence_index=event.sequence_finished.sequence_index, reason=pb.FINISH_REASON_LENGTH)
            event.sequence_finished.CopyFrom(end)
        elif kind == "completed":
            event.completed.usage.output_tokens = 0
        if kind != "tokens":
            yield event


def tool_calls(calls: Sequence[pb.ToolCall]) -> list[dict[str, Any]]:
    """Whole calls of one message."""
    return [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]


def tool_call_delta(delta: pb.ToolCallDelta) -> dict[str, Any]:
    """A piece of a call: id, type and name with the first piece alone."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if not delta.id:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name} | function}


def chat_choice(sequence: pb.GeneratedSequence, with_ids: bool) -> dict[str, Any]:
    """One choice of a whole chat answer."""
    message: dict[str, Any] = {"role": "assistant", "content": sequence.text or (None if sequence.tool_calls else ""), "refusal": None}
    if sequence.reasoning_text:
        message["reasoning_content"] = sequence.reasoning_text
    if sequence.tool_calls:
        message["tool_calls"] = tool_calls(sequence.tool_calls)
    choice = {
        "index": sequence.sequence_index, "message": message, "logprobs": chat_logprobs(sequence.logprobs),
        "finish_reason": finish_reason(sequence.reason, bool(sequence.tool_calls)), "stop_reason": stop_reason(sequence),
    }
    return choice | ({"token_ids": list(sequence.token_ids)} if with_ids else {})


def text_choice(sequence: pb.GeneratedSequence, index: int, echo: Echo, with_ids: bool) -> dict[str, Any]:
    """One choice of a whole completion. echo: what it repeats of the prompt."""
    logprobs = TextLogprobs(echo)
    choice = {
        "index": index, "text": echo.text + sequence.text, "logprobs": joined(logprobs.of_prompt(), logprobs.of(sequence.logprobs)),
        "finish_reason": finish_reason(sequence.reason, False), "stop_reason": stop_reason(sequence),
    }
    return choice | ({"token_ids": list(sequence.token_ids)} if with_ids else {})
