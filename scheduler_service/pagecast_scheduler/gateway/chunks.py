"""Streams of OpenAI's chunks from streams of our events, as server-sent events."""

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from pagecast.errors import RpcError
from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.gateway import answers
from pagecast_scheduler.gateway.backend import EventStream
from pagecast_scheduler.gateway.errors import of_rpc
from pagecast_scheduler.gateway.schema import StreamOptions

Echoed = Callable[[Sequence[pb.TokenLogprob]], Awaitable[answers.Echo]]

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
    """One prompt's part of a streamed completion. first_index: the index of its first choice. echoed: makes what its choices repeat of the
    prompt, from log-probabilities if there are any; raises RpcError."""

    def __init__(self, events: AsyncIterable[pb.StreamEvent], writer: ChunkWriter, first_index: int, echoed: Echoed) -> None:
        self._events = events
        self._writer = writer
        self._first_index = first_index
        self._echoed = echoed
        self._prompt_records: list[pb.TokenLogprob] = []
        self._echo: answers.Echo | None = None
        self._logprobs: dict[int, answers.TextLogprobs] = {}
        self.usage = pb.Usage()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises RpcError."""
        async for event in self._events:
            kind = event.WhichOneof("event")
            if kind == "accepted":
                self._writer.note_accepted(event.accepted)
            elif kind == "prompt":
                self._prompt_records.extend(event.prompt.logprobs)
            elif kind == "tokens":
                yield await self._tokens_chunk(event.tokens)
            elif kind == "progress":
                yield QUIET
            elif kind == "sequence_finished":
                yield await self._end_chunk(event.sequence_finished)
            elif kind == "completed":
                self.usage = event.completed.usage

    async def _beginning(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """What stands before an output in its first chunk: text and its log-probabilities. Nothing in later ones."""
        if index in self._logprobs:
            return "", None
        if self._echo is None:
            self._echo = await self._echoed(self._prompt_records)
        self._logprobs[index] = answers.TextLogprobs(self._echo)
        return self._echo.text, self._logprobs[index].of_prompt()

    async def _tokens_chunk(self, event: pb.TokensEvent) -> bytes:
        index = event.sequence_index
        text, before = await self._beginning(index)
        logprobs = answers.joined(before, self._logprobs[index].of(event.logprobs))
        return self._writer.chunk([self._writer.choice(self._first_index + index, {"text": text + event.text}, logprobs, event.token_ids)])

    async def _end_chunk(self, end: pb.SequenceFinishedEvent) -> bytes:
        text, logprobs = await self._beginning(end.sequence_index)  # of an output without a token
        return self._writer.chunk([{
            "index": self._first_index + end.sequence_index, "text": text, "logprobs": logprobs,
            "finish_reason": answers.finish_reason(end.reason, False), "stop_reason": answers.stop_reason(end),
        }])
