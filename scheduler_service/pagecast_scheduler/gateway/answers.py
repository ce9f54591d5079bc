"""From the gRPC API's answers to OpenAI's response bodies and chunks. Pure: messages in, dictionaries out."""

from collections.abc import Iterable, Sequence
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


def text_logprobs(records: Sequence[pb.TokenLogprob], offset: int) -> dict[str, Any] | None:
    """The logprobs object of a completion choice. offset: characters of the choice's text before these tokens."""
    if not records:
        return None
    tokens, offsets = [], []
    for record in records:
        tokens.append(_shown(record.token_bytes))
        offsets.append(offset)
        offset += len(tokens[-1])
    values = [record.logprob if record.HasField("logprob") else None for record in records]
    tops = [{_shown(one.token_bytes): one.logprob for one in record.top} or None for record in records]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


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


def text_choice(
    sequence: pb.GeneratedSequence, index: int, echoed: str, prompt_records: Sequence[pb.TokenLogprob], with_ids: bool
) -> dict[str, Any]:
    """One choice of a whole completion. echoed: the prompt's text, where it is to be repeated; prompt_records: its log-probabilities."""
    records = [*prompt_records, *sequence.logprobs]
    choice = {
        "index": index, "text": echoed + sequence.text, "logprobs": text_logprobs(records, 0 if prompt_records else len(echoed)),
        "finish_reason": finish_reason(sequence.reason, False), "stop_reason": stop_reason(sequence),
    }
    return choice | ({"token_ids": list(sequence.token_ids)} if with_ids else {})
