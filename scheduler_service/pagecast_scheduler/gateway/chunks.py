"""Streams of OpenAI's chunks from streams of our events, as server-sent events."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pagecast.errors import RpcError
from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.gateway import answers
from pagecast_scheduler.gateway.backend import EventStream
from pagecast_scheduler.gateway.errors import of_rpc
from pagecast_scheduler.gateway.schema import StreamOptions

DONE = b"data: [DONE]\n\n"
QUIET = b": still working\n\n"
"""A comment, which clients pass over: sent for our progress events, so that proxies see a live connection."""


def frame(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ChunkWriter:
    """Chunks of one response. base: the fields that every chunk repeats. options: whether usage is wanted, and when."""

    def __init__(self, base: dict[str, Any], options: StreamOptions | None, with_ids: bool) -> None:
        self._base = base
        self._options = options or StreamOptions()
        self._with_ids = with_ids
        self._prompt_tokens = 0
        self._output_tokens = 0

    def chunk(self, choices: Sequence[dict[str, Any]]) -> bytes:
        """A chunk with these choices."""
        made = self._base | {"choices": list(choices)}
        if self._options.continuous_usage_stats:
            made["usage"] = answers.usage([pb.Usage(prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens)])
        elif self._options.include_usage:
            made["usage"] = None
        return frame(made)

    def note_accepted(self, event: pb.AcceptedEvent) -> None:
        self._prompt_tokens += event.prompt_tokens

    def choice(self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, tokens: Sequence[int]) -> dict[str, Any]:
        """A choice of a chunk. content: its text, or its delta."""
        self._output_tokens += len(tokens)
        made = {"index": index} | content | {"logprobs": logprobs, "finish_reason": None}
        return made | ({"token_ids": list(tokens)} if self._with_ids else {})

    def last(self, usages: Sequence[pb.Usage]) -> bytes:
        """What follows the last choice."""
        if not self._options.include_usage:
            return DONE
        return frame(self._base | {"choices": [], "usage": answers.usage(usages)}) + DONE


async def chat_chunks(stream: EventStream, writer: ChunkWriter) -> AsyncIterator[bytes]:
    """Every chunk of a chat answer. An error after the first event ends the stream with an error object and no [DONE]."""
    begun: set[int] = set()
    called: set[int] = set()

    def tokens_chunk(event: pb.TokensEvent) -> bytes:
        index = event.sequence_index
        delta: dict[str, Any] = {} if index in begun else {"role": "assistant", "content": ""}
        begun.add(index)
        if event.text:
            delta["content"] = event.text
        if event.reasoning_text:
            delta["reasoning_content"] = event.reasoning_text
        if event.tool_calls:
            called.add(index)
            delta["tool_calls"] = [answers.tool_call_delta(piece) for piece in event.tool_calls]
        return writer.chunk([writer.choice(index, {"delta": delta}, answers.chat_logprobs(event.logprobs), event.token_ids)])

    try:
        async for event in stream:
            kind = event.WhichOneof("event")
            if kind == "accepted":
                writer.note_accepted(event.accepted)
            elif kind == "tokens":
                yield tokens_chunk(event.tokens)
            elif kind == "progress":
                yield QUIET
            elif kind == "sequence_finished":
                end = event.sequence_finished
                reason = answers.finish_reason(end.reason, end.sequence_index in called)
                why = {"finish_reason": reason, "stop_reason": answers.stop_reason(end)}
                yield writer.chunk([{"index": end.sequence_index, "delta": {}, "logprobs": None} | why])
            elif kind == "completed":
                yield writer.last([event.completed.usage])
    except RpcError as error:
        yield frame(of_rpc(error)[1])
    finally:
        stream.close()


class CompletionPart:
    """One prompt's part of a streamed completion. first_index: the index of its first choice. echoed: its text, if to be repeated."""

    def __init__(self, stream: EventStream, writer: ChunkWriter, first_index: int, echoed: str) -> None:
        self._stream = stream
        self._writer = writer
        self._first_index = first_index
        self._echoed = echoed
        self._prompt_records: list[pb.TokenLogprob] = []
        self._lengths: dict[int, int] = {}
        self.usage = pb.Usage()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises RpcError."""
        try:
            async for event in self._stream:
                kind = event.WhichOneof("event")
                if kind == "accepted":
                    self._writer.note_accepted(event.accepted)
                elif kind == "prompt":
                    self._prompt_records.extend(event.prompt.logprobs)
                elif kind == "tokens":
                    yield self._tokens_chunk(event.tokens)
                elif kind == "progress":
                    yield QUIET
                elif kind == "sequence_finished":
                    yield self._end_chunk(event.sequence_finished)
                elif kind == "completed":
                    self.usage = event.completed.usage
        finally:
            self._stream.close()

    def _tokens_chunk(self, event: pb.TokensEvent) -> bytes:
        index, text = event.sequence_index, event.text
        records: list[pb.TokenLogprob] = list(event.logprobs)
        if index not in self._lengths:
            self._lengths[index] = 0 if self._prompt_records else len(self._echoed)
            text = self._echoed + text
            records = self._prompt_records + records
        logprobs = answers.text_logprobs(records, self._lengths[index])
        self._lengths[index] += len(text)
        return self._writer.chunk([self._writer.choice(self._first_index + index, {"text": text}, logprobs, event.token_ids)])

    def _end_chunk(self, end: pb.SequenceFinishedEvent) -> bytes:
        echoed = "" if end.sequence_index in self._lengths else self._echoed  # an output without a token
        return self._writer.chunk([{
            "index": self._first_index + end.sequence_index, "text": echoed, "logprobs": None,
            "finish_reason": answers.finish_reason(end.reason, False), "stop_reason": answers.stop_reason(end),
        }])
