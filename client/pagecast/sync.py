"""Client: the API for programs without an event loop, over grpc's synchronous interface. Safe to share between threads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pagecast import access, answers, channel, requests, types
from pagecast.admin import Admin
from pagecast.errors import RpcError, from_rpc
from pagecast.reaching import Reach
from pagecast.resuming import CANCEL_S, Position, cancelled
from pagecast.sampling import SamplingParams
from pagecast.stubs import Stubs
from pagecast.v1 import generation_pb2, model_pb2, runtime_pb2
from pagecast.watching import Watch

T = TypeVar("T")


class Stream:
    """The events of one request. Iterate it; leaving early, `cancel()` or dropping it ends the request on the server.

    When the server is lost on the way, the stream goes on where it was on another, or on the same once it is back. Raises an RpcError
    of pagecast.errors where the call fails for good.
    """

    def __init__(self, stub: Any, position: Position, metadata: Sequence[tuple[str, str]], reach: Reach) -> None:
        self._stub = stub
        self._reach = reach
        self._position = position
        self._metadata = metadata
        self._is_over = False
        self._left = threading.Event()
        self._begin()

    def _begin(self) -> None:
        self._call = self._position.call(self._stub, self._metadata)
        self._messages: Iterator[Any] = iter(self._call)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> types.Event:
        while True:
            try:
                message = next(self._messages)
            except grpc.RpcError as error:
                self._go_on(from_rpc(error))
                continue
            except StopIteration:
                self._is_over = True
                raise
            self._reach.has_answered = True
            told = self._position.take(message.event)
            event = None if told is None else answers.event(told)
            if event is not None:
                return event

    def _go_on(self, error: RpcError) -> None:
        """Begin the next call, or raise."""
        if self._left.is_set():
            raise cancelled()
        if self._is_over:
            raise error
        try:
            wait = self._position.wait_after(error)
        except RpcError as final:
            self._is_over = True
            raise (self._reach.explained(error) if final is error else final) from None
        if self._left.wait(wait):
            raise cancelled()
        self._begin()
        if self._left.is_set():  # between the two
            self._call.cancel()

    def cancel(self) -> None:
        """End the request; its blocks on the server are freed. Harmless after the end. An iteration that waits in another thread raises
        Cancelled."""
        self._left.set()
        self._call.cancel()
        if not self._is_over and (request := self._position.cancellation()) is not None:
            self._stub.CancelGeneration.future(request, timeout=CANCEL_S, metadata=self._metadata)
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()


class Client:
    """One connection to a server, or to several alike; best as `with Client() as client`.

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
            self._channel = grpc.insecure_channel(way.target, way.options)
        else:
            self._channel = grpc.secure_channel(way.target, way.credentials, way.options)
        self._stubs = Stubs(self._channel)
        self._reach = Reach(self._channel, way.target, self._metadata)
        self.admin = Admin(self._channel, self._ask)

    def stream(self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]) -> Stream:
        """Generate, event by event: Accepted, then Tokens and Progress, SequenceFinished, Completed."""
        request = requests.generate_stream(prompt, sampling, options)
        position = Position.of(request, requests.timeout(options.get("timeout")), options.get("resume", True))
        return Stream(self._stubs.generation, position, self._metadata, self._reach)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        """End a request of this caller by its id. False if it had ended before; NotFound if the server knows no such request."""
        request = generation_pb2.CancelGenerationRequest(request_id=request_id)
        answer = self._ask(self._stubs.generation.CancelGeneration, request, timeout)
        return bool(answer.result == generation_pb2.CANCEL_RESULT_CANCELLED)

    def generate(
        self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]
    ) -> types.Generation:
        """Generate and return the whole result."""
        request = requests.generate(prompt, sampling, options)
        return answers.generation(self._ask(self._stubs.generation.Generate, request, options.get("timeout")))

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, model: str = "", timeout: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of `text`, as generation sees them."""
        request = requests.tokenize(text, add_special_tokens, model)
        return tuple(self._ask(self._stubs.tokenizer.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "", timeout: float | None = None
    ) -> str:
        """Text of `token_ids`."""
        request = requests.detokenize(token_ids, skip_special_tokens, model)
        return str(self._ask(self._stubs.tokenizer.Detokenize, request, timeout).text)

    def count_tokens(self, prompt: str | requests.Chat, **options: Unpack[requests.RequestOptions]) -> int:
        """How many tokens a text or a conversation has. options: those of conversations, model and timeout."""
        request = requests.count_tokens(prompt, options)
        return int(self._ask(self._stubs.tokenizer.CountTokens, request, options.get("timeout")).num_tokens)

    def render_chat(self, messages: requests.Chat, **options: Unpack[requests.RequestOptions]) -> types.RenderedChat:
        """What a conversation becomes under the model's own template. options: those of conversations, model and timeout."""
        request = requests.render_chat(messages, options)
        return answers.rendered_chat(self._ask(self._stubs.tokenizer.RenderChat, request, options.get("timeout")))

    def models(self, *, timeout: float | None = None) -> tuple[types.Model, ...]:
        """The models served."""
        return tuple(map(answers.model, self._ask(self._stubs.models.ListModels, model_pb2.ListModelsRequest(), timeout).models))

    def load(self, *, timeout: float | None = None) -> types.Load:
        """How busy the instance that answers is."""
        return answers.load(self._ask(self._stubs.runtime.GetLoad, runtime_pb2.GetLoadRequest(), timeout))

    def watch_load(self, *, min_interval: float = 1.0) -> Watch[types.Load]:
        """The load now, then whenever it has changed, at most once in min_interval seconds (0.1 to 60)."""
        request = requests.watch_load(min_interval)
        return Watch(self._stubs.runtime.WatchLoad(request, metadata=self._metadata), answers.watched_load)

    def watch_cache_events(
        self, *, after: types.CacheEvents | None = None, include_token_ids: bool = False
    ) -> Watch[types.CacheEvents]:
        """What the prefix cache holds, then every change. after: the last that another watch told, to go on there; a snapshot comes if that
        is no longer known. include_token_ids: also what the blocks hold, which are prompts."""
        request = requests.watch_cache_events(after, include_token_ids)
        return Watch(self._stubs.runtime.WatchCacheEvents(request, metadata=self._metadata), answers.cache_events)

    def server_info(self, *, timeout: float | None = None) -> types.ServerInfo:
        """Which server answers."""
        return answers.server_info(self._ask(self._stubs.runtime.GetServerInfo, runtime_pb2.GetServerInfoRequest(), timeout))

    def health(self, service: str = "", *, timeout: float | None = None) -> types.HealthStatus:
        """grpc.health.v1 status of the server, or of one service."""
        return channel.health_status(self._ask(self._stubs.health, channel.health_request(service), timeout))

    @property
    def grpc_channel(self) -> grpc.Channel:
        """The channel, for stubs of services that this class has no method for; to be called with `metadata`."""
        return self._channel

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        """What is sent with every call."""
        return self._metadata

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, method: Callable[..., T], request: Any, timeout: float | None = None) -> T:
        try:
            answer = method(request, timeout=requests.timeout(timeout), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._reach.explained(from_rpc(error)) from None
        self._reach.has_answered = True
        return answer
