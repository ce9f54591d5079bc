"""The outermost layer of every method: what comes in is decoded safely, what goes wrong leaves as a status without inner text.

Services are registered on a `Boundary` as if it were the server. Each handler gets a deserializer that cannot raise (gRPC would
send the exception's name) and a wrapper that turns `Refusal` into status details and anything unexpected into INTERNAL with an
opaque id that also stands in the log.
"""

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from pagecast_scheduler.frontend import call_context
from pagecast_scheduler.frontend.errors import Reason, Refusal

log = structlog.get_logger("pagecast.frontend")

Behaviour = Callable[[Any, Any], Awaitable[Any]]
Around = Callable[[str, Behaviour], Behaviour]
"""What stands before every method: from its name and its behaviour to another behaviour."""


def _too_large(size: int, limit: int) -> Refusal:
    facts = {"limit": str(limit), "actual": str(size)}
    return Refusal(Reason.MESSAGE_TOO_LARGE, message=f"the message must be at most {limit} bytes, not {size}", metadata=facts)


def _safe(deserialize: Callable[[bytes], Any], max_bytes: int) -> Callable[[bytes], Any]:
    """The same deserializer, giving a Refusal instead of raising on bytes that are not the message, or too many."""

    def decode(data: bytes) -> Any:
        if len(data) > max_bytes:
            return _too_large(len(data), max_bytes)
        try:
            return deserialize(data)
        except (DecodeError, ValueError, RecursionError):
            return Refusal(Reason.MALFORMED_REQUEST)

    return decode


async def end_with(context: Any, refusal: Refusal) -> None:
    """Ends the call with the refusal's status and trailers. Never returns."""
    # Where it was raised is of no more use, and would hold the whole request, in a cycle, until the collector comes by.
    refusal.__traceback__ = refusal.__context__ = None
    call_context.current().reason = refusal.reason.name
    await context.abort(refusal.reason.code, refusal.text(), refusal.trailers())


def _bug(method: str) -> Refusal:
    """An unexpected exception: the log gets the traceback, the caller an opaque id that names the log line."""
    error_id = secrets.token_hex(8)
    log.error("unexpected error in a call", method=method, error_id=error_id, exc_info=True)
    return Refusal(Reason.BUG, message=f"internal error {error_id}", metadata={"error_id": error_id})


def _is_being_cancelled() -> bool:
    """Whether somebody cancels this call. A handler that raises CancelledError by itself would leave its caller without an end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _gone() -> asyncio.CancelledError:
    """What to raise when gRPC could not send: the caller left while a write was waiting for it, and the word of the cancel only
    comes after the failed write. Not our bug, and nobody is left to tell."""
    return asyncio.CancelledError("the caller is gone")


async def settled(method: str, work: Awaitable[Any]) -> Any:
    """What `work` gives, or the Refusal that says why it gives nothing. Raises for the caller's own cancel, and once the call has ended."""
    try:
        return await work
    except Refusal as refusal:
        return refusal
    except grpc.aio.AbortError:
        raise
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        return _bug(method)
    except grpc.aio.InternalError:
        raise _gone() from None
    except Exception:
        return _bug(method)


async def _guarded(method: str, work: Awaitable[Any], context: Any) -> Any:
    """What `work` gives, unless it raises: then the call ends with a status, or with the caller's own cancel."""
    answer = await settled(method, work)
    return await end_with(context, answer) if isinstance(answer, Refusal) else answer


def _unary(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def work(request: Any, context: Any) -> Any:
        if isinstance(request, Refusal):
            raise request
        return await behaviour(request, context)

    return lambda request, context: _guarded(method, work(request, context), context)


def _bidirectional(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """For handlers over a request stream: async generators (reflection), or such as write through the context."""

    async def requests(stream: AsyncIterator[list[Any]]) -> AsyncIterator[Any]:
        async for held in stream:
            request = held.pop()
            if isinstance(request, Refusal):
                raise request
            yield request
            del request  # which may be megabytes, and the next one may be long in coming

    async def work(stream: AsyncIterator[Any], context: Any) -> Any:
        answering = behaviour(requests(stream), context)
        if inspect.isawaitable(answering):
            return await answering
        async for response in answering:
            await context.write(response)

    return lambda stream, context: _guarded(method, work(stream, context), context)


def wrap(method: str, handler: Any, max_bytes: int, around: Around) -> Any:
    """A method handler with safe decoding and the error boundary around it, and `around` around that. Response streams write through
    the context."""
    decode = _safe(handler.request_deserializer, max_bytes)
    if handler.request_streaming:
        behaviour = around(method, _bidirectional(method, handler.stream_stream))
        # In a list that it is taken out of: gRPC keeps what it has read until it has read the next.
        return grpc.stream_stream_rpc_method_handler(behaviour, lambda data: [decode(data)], handler.response_serializer)
    if handler.response_streaming:
        behaviour = around(method, _unary(method, handler.unary_stream))
        return grpc.unary_stream_rpc_method_handler(behaviour, decode, handler.response_serializer)
    behaviour = around(method, _unary(method, handler.unary_unary))
    return grpc.unary_unary_rpc_method_handler(behaviour, decode, handler.response_serializer)


class Boundary:
    """Takes the place of a server in the generated add_..._to_server functions and registers wrapped handlers on the real one."""

    def __init__(self, server: grpc.aio.Server, max_message_bytes: int, around: Around) -> None:
        self._server = server
        self._around = around
        self._max_message_bytes = max_message_bytes

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Registered handlers cover every method; the generic ones would bypass the boundary."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Registers each method of `service`, wrapped."""
        self.add_service(service, handlers)

    def add_service(self, service: str, handlers: dict[str, Any]) -> None:
        """Registers methods under a service name of the caller's choice (reflection answers to two)."""
        wrapped = {name: wrap(f"/{service}/{name}", handler, self._max_message_bytes, self._around) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
