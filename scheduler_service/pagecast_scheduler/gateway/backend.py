"""The gateway's side of the gRPC API: channels to the front ends, calls with a caller's credentials, answers as messages.

A call goes to one front end; a front end that is not there is passed over for the next, as long as nothing has been answered.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pagecast.access import Tls
from pagecast.channel import channel_options, health_request, health_status, target_of
from pagecast.errors import RpcError, Unavailable, WrongAccess, from_rpc
from pagecast.stubs import Stubs
from pagecast.v1 import generation_pb2, model_pb2, runtime_pb2, tokenizer_pb2
from pagecast_scheduler.frontend.reloading import Reloading

HEALTH_TIMEOUT_S = 2.0
CONNECTIONS = 4
"""To each front end, which answers so many calls on one connection and no more."""

Metadata = tuple[tuple[str, str], ...]


class _Endpoint:
    """One channel and its stubs."""

    def __init__(self, target: str, options: Sequence[tuple[str, str]], credentials: grpc.ChannelCredentials | None) -> None:
        address, given = target_of(target), channel_options([("grpc.use_local_subchannel_pool", 1), *options])
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, given)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, given)
        self.stubs = Stubs(self.channel)


def _followed(tls: Tls) -> Reloading[grpc.ChannelCredentials]:
    """What front ends are trusted by and shown, made again when its files change. Raises WrongAccess."""
    paths = [Path(path) for path in (tls.ca, tls.cert, tls.key) if path is not None]
    try:
        return Reloading("certificates for front ends", paths, tls.credentials)
    except OSError as error:
        raise WrongAccess(f"cannot read {error.filename}: {error.strerror}") from None


class Backend:
    """Every front end behind this gateway. Must be made inside the event loop."""

    def __init__(self, targets: Sequence[str], tls: Tls | None = None) -> None:
        """Raises WrongAccess for a target that is none, and for files that are of no use to TLS."""
        self._targets, self._tls = targets, tls
        self._current = None if tls is None else _followed(tls)
        self._turn = itertools.count()
        self._connect()

    async def close(self) -> None:
        """Ends every call and channel."""
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints))

    def _connect(self) -> None:
        """New channels. Those before, if there are any, end with their last calls, when nothing refers to them any more."""
        options = [] if self._tls is None else self._tls.options()
        self._credentials = None if self._current is None else self._current.value
        self._endpoints = [_Endpoint(target, options, self._credentials) for _ in range(CONNECTIONS) for target in self._targets]

    def _in_turn(self) -> list[_Endpoint]:
        if self._current is not None and self._current.value is not self._credentials:
            self._connect()
        start = next(self._turn) % len(self._endpoints)
        return self._endpoints[start:] + self._endpoints[:start]

    async def _ask(self, call: Callable[[Stubs], Any]) -> Any:
        """The answer of the first front end that is there. Raises the last RpcError."""
        endpoints = self._in_turn()
        for endpoint in endpoints:
            try:
                return await call(endpoint.stubs)
            except grpc.RpcError as failed:
                error = from_rpc(failed)
                if not isinstance(error, Unavailable) or endpoint is endpoints[-1]:
                    raise error from None
        raise AssertionError("there is always a last endpoint")

    async def generate(self, spec: generation_pb2.GenerationSpec, metadata: Metadata) -> generation_pb2.GenerateResponse:
        """One whole result. Raises RpcError."""
        request = generation_pb2.GenerateRequest(spec=spec)
        answer: generation_pb2.GenerateResponse = await self._ask(lambda stubs: stubs.generation.Generate(request, metadata=metadata))
        return answer

    async def stream(self, spec: generation_pb2.GenerationSpec, metadata: Metadata) -> "EventStream":
        """A stream whose first event has arrived, so that a refusal can still become an HTTP status. Raises RpcError."""
        request = generation_pb2.GenerateStreamRequest(spec=spec)

        async def begin(stubs: Stubs) -> EventStream:
            call = stubs.generation.GenerateStream(request, metadata=metadata)
            events = call.__aiter__()
            try:
                return EventStream(call, events, await anext(events))
            except BaseException:
                call.cancel()
                raise

        begun: EventStream = await self._ask(begin)
        return begun

    async def refusal(self, spec: generation_pb2.GenerationSpec, metadata: Metadata) -> RpcError | None:
        """What is said against a spec that is not to be run: it is asked under an id that no front end takes."""
        asked = generation_pb2.GenerationSpec()
        asked.CopyFrom(spec)
        asked.request_id = " "
        try:
            await self.generate(asked, metadata)
        except RpcError as error:
            return error
        return None

    async def tokenize(self, text: str, add_special_tokens: bool, model: str, metadata: Metadata) -> list[int]:
        request = tokenizer_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list((await self._ask(lambda stubs: stubs.tokenizer.Tokenize(request, metadata=metadata))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], model: str, metadata: Metadata) -> str:
        request = tokenizer_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=False)
        text: str = (await self._ask(lambda stubs: stubs.tokenizer.Detokenize(request, metadata=metadata))).text
        return text

    async def render_chat(self, chat: generation_pb2.ChatPrompt, model: str, metadata: Metadata) -> list[int]:
        request = tokenizer_pb2.RenderChatRequest(model=model, chat=chat)
        return list((await self._ask(lambda stubs: stubs.tokenizer.RenderChat(request, metadata=metadata))).token_ids)

    async def room(self, spec: generation_pb2.GenerationSpec, metadata: Metadata) -> int:
        """How many tokens of output a spec's text or token ids leave room for; 0 or less: none. Raises RpcError."""
        request = tokenizer_pb2.CountTokensRequest(model=spec.model, text=spec.prompt_text)
        answer = await self._ask(lambda stubs: stubs.tokenizer.CountTokens(request, metadata=metadata))
        return int(answer.max_model_len) - (len(spec.prompt_token_ids.ids) or int(answer.num_tokens))

    async def models(self, metadata: Metadata) -> list[model_pb2.Model]:
        request = model_pb2.ListModelsRequest()
        return list((await self._ask(lambda stubs: stubs.models.ListModels(request, metadata=metadata))).models)

    async def load(self, metadata: Metadata) -> runtime_pb2.GetLoadResponse:
        request = runtime_pb2.GetLoadRequest()
        answer: runtime_pb2.GetLoadResponse = await self._ask(lambda stubs: stubs.runtime.GetLoad(request, metadata=metadata))
        return answer

    async def is_serving(self, metadata: Metadata) -> bool:
        """Whether any front end says SERVING to this caller."""
        for endpoint in self._in_turn():
            try:
                if health_status(await endpoint.stubs.health(health_request(""), timeout=HEALTH_TIMEOUT_S, metadata=metadata)) == "SERVING":
                    return True
            except grpc.RpcError:
                continue
        return False


class EventStream:
    """The events of one call. Iterate it once; `close` ends the request on the server unless it is over."""

    def __init__(self, call: Any, events: AsyncIterator[Any], first: Any) -> None:
        self._call = call
        self._events = events
        self.first: generation_pb2.StreamEvent = first.event

    async def __aiter__(self) -> AsyncIterator[generation_pb2.StreamEvent]:
        yield self.first
        try:
            async for message in self._events:
                yield message.event
        except grpc.RpcError as failed:
            raise from_rpc(failed) from None

    def close(self) -> None:
        self._call.cancel()


__all__ = ["Backend", "EventStream", "Metadata", "RpcError"]
