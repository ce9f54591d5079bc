"""AsyncClient: the API over grpc.aio, with typed events, results and errors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from pagecast import access, answers, channel, requests, types
from pagecast.admin import AsyncAdmin
from pagecast.errors import RpcError, from_rpc
from pagecast.reaching import AsyncReach
from pagecast.resuming import CANCEL_S, Position, cancelled
from pagecast.sampling import SamplingParams
from pagecast.stubs import Stubs
from pagecast.v1 import generation_pb2, model_pb2, runtime_pb2
from pagecast.watching import AsyncWatch, is_task_cancelled

T = TypeVar("T")


class AsyncStream:
    """The events of one request. Iterate it; leaving early, `cancel()` or dropping it ends the request on the server.

    When the server is lost on the way, the stream goes on where it was on another, or on the same once it is back. Raises an RpcError
    of pagecast.errors where the call fails for good.
    """

    def __init__(self, stub: Any, position: Position, metadata: Sequence[tuple[str, str]], reach: AsyncReach) -> None:
        self._stub = stub
        self._reach = reach
        self._position = position
        self._metadata = metadata
        self._is_over = False
        self._left = asyncio.Event()
        self._last_word: asyncio.Future[Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._call = self._position.call(self._stub, self._metadata)
        self._messages: AsyncIterator[Any] = self._call.__aiter__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> types.Event:
        while True:
            try:
                message = await anext(self._messages)
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                self._is_over = True
                raise cancelled() from None
            except grpc.RpcError as error:
                await self._go_on(from_rpc(error))
                continue
            except StopAsyncIteration:
                self._is_over = True
                raise
            self._reach.has_answered = True
            told = self._position.take(message.event)
            event = None if told is None else answers.event(told)
            if event is not None:
                return event

    async def _go_on(self, error: RpcError) -> None:
        """Begin the next call, or raise."""
        if self._left.is_set():
            raise cancelled()
        if self._is_over:
            raise error
        try:
            wait = self._position.wait_after(error)
        except RpcError as final:
            self._is_over = True
            raise (await self._reach.explained(error) if final is error else final) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._left.wait()
            raise cancelled()
        self._begin()

    def cancel(self) -> None:
        """End the request; its blocks on the server are freed. Harmless after the end. A task that waits for an event gets Cancelled."""
        self._left.set()
        self._call.cancel()
        if not self._is_over and (request := self._position.cancellation()) is not None:
            self._last_word = asyncio.ensure_future(self._say_cancel(request))
        self._is_over = True

    async def _say_cancel(self, request: generation_pb2.CancelGenerationRequest) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._stub.CancelGeneration(request, timeout=CANCEL_S, metadata=self._metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()


class AsyncClient:
    """One connection to a server, or to several alike. Use it inside one event loop, best as `async with AsyncClient() as client`.

    endpoints: HOST:PORT, unix:PATH, or several IP:PORT to spread over. tls: True, or a `Tls` with an authority, a client certificate or
    a server name; absent: plaintext. token: a bearer token, sent over TLS or to this machine alone. credentials: gRPC's own, in place
    of tls. metadata: sent with every call. Raises ValueError where these do not go together.
    """

    def __init__(
        self, endpoints: str | Sequence[str] = channel.DEFAULT_TARGET, *, tls: access.Tls | bool | None = None, token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None, metadata: Sequence[tuple[str, str]] = (),
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        way = channel.connection(endpoints, tls, token, credentials, metadata, options)
        self._metadata = way.metadata
        if way.credentials is None:
            self._channel = grpc.aio.insecure_channel(way.target, way.options)
        else:
            self._channel = grpc.aio.secure_channel(way.target, way.credentials, way.options)
        self._stubs = Stubs(self._channel)
        self._reach = AsyncReach(self._channel, way.target, self._metadata)
        self.admin = AsyncAdmin(self._channel, self._ask_method)

    def stream(
        self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]
    ) -> AsyncStream:
        """Generate, event by event: Accepted, then Tokens and Progress, SequenceFinished, Completed."""
        request = requests.generate_stream(prompt, sampling, options)
        position = Position.of(request, requests.timeout(options.get("timeout")), options.get("resume", True))
        return AsyncStream(self._stubs.generation, position, self._metadata, self._reach)

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request of this caller by its id. False if it had ended before; NotFound if the server knows no such request."""
        request = generation_pb2.CancelGenerationRequest(request_id=request_id)
        answer = await self._ask_method(self._stubs.generation.CancelGeneration, request, timeout)
        return bool(answer.result == generation_pb2.CANCEL_RESULT_CANCELLED)

    async def generate(
        self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]
    ) -> types.Generation:
        """Generate and return the whole result."""
        request = requests.generate(prompt, sampling, options)
        call = self._stubs.generation.Generate(request, timeout=requests.timeout(options.get("timeout")), metadata=self._metadata)
        return answers.generation(await self._ask(call))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str = "", timeout: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of `text`, as generation sees them."""
        request = requests.tokenize(text, add_special_tokens, model)
        return tuple((await self._ask_method(self._stubs.tokenizer.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "", timeout: float | None = None
    ) -> str:
        """Text of `token_ids`."""
        request = requests.detokenize(token_ids, skip_special_tokens, model)
        return str((await self._ask_method(self._stubs.tokenizer.Detokenize, request, timeout)).text)

    async def count_tokens(self, prompt: str | requests.Chat, **options: Unpack[requests.RequestOptions]) -> int:
        """How many tokens a text or a conversation has. options: those of conversations, model and timeout."""
        request = requests.count_tokens(prompt, options)
        return int((await self._ask_method(self._stubs.tokenizer.CountTokens, request, options.get("timeout"))).num_tokens)

    async def render_chat(self, messages: requests.Chat, **options: Unpack[requests.RequestOptions]) -> types.RenderedChat:
        """What a conversation becomes under the model's own template. options: those of conversations, model and timeout."""
        request = requests.render_chat(messages, options)
        return answers.rendered_chat(await self._ask_method(self._stubs.tokenizer.RenderChat, request, options.get("timeout")))

    async def models(self, *, timeout: float | None = None) -> tuple[types.Model, ...]:
        """The models served."""
        answer = await self._ask_method(self._stubs.models.ListModels, model_pb2.ListModelsRequest(), timeout)
        return tuple(map(answers.model, answer.models))

    async def load(self, *, timeout: float | None = None) -> types.Load:
        """How busy the instance that answers is."""
        return answers.load(await self._ask_method(self._stubs.runtime.GetLoad, runtime_pb2.GetLoadRequest(), timeout))

    def watch_load(self, *, min_interval: float = 1.0) -> AsyncWatch[types.Load]:
        """The load now, then whenever it has changed, at most once in min_interval seconds (0.1 to 60)."""
        request = requests.watch_load(min_interval)
        return AsyncWatch(self._stubs.runtime.WatchLoad(request, metadata=self._metadata), answers.watched_load)

    def watch_cache_events(
        self, *, after: types.CacheEvents | None = None, include_token_ids: bool = False
    ) -> AsyncWatch[types.CacheEvents]:
        """What the prefix cache holds, then every change. after: the last that another watch told, to go on there; a snapshot comes if that
        is no longer known. include_token_ids: also what the blocks hold, which are prompts."""
        request = requests.watch_cache_events(after, include_token_ids)
        return AsyncWatch(self._stubs.runtime.WatchCacheEvents(request, metadata=self._metadata), answers.cache_events)

    async def server_info(self, *, timeout: float | None = None) -> types.ServerInfo:
        """Which server answers."""
        request = runtime_pb2.GetServerInfoRequest()
        return answers.server_info(await self._ask_method(self._stubs.runtime.GetServerInfo, request, timeout))

    async def health(self, service: str = "", *, timeout: float | None = None) -> types.HealthStatus:
        """grpc.health.v1 status of the server, or of one service."""
        call = self._stubs.health(channel.health_request(service), timeout=requests.timeout(timeout), metadata=self._metadata)
        return channel.health_status(await self._ask(call))

    @property
    def grpc_channel(self) -> grpc.aio.Channel:
        """The channel, for stubs of services that this class has no method for; to be called with `metadata`."""
        return self._channel

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What is sent with every call."""
        return self._metadata

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _ask_method(self, method: Any, request: Any, timeout: float | None) -> Any:
        return await self._ask(method(request, timeout=requests.timeout(timeout), metadata=self._metadata))

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise cancelled() from None  # the client was closed
        except grpc.RpcError as error:
            raise await self._reach.explained(from_rpc(error)) from None
        self._reach.has_answered = True
        return answer
