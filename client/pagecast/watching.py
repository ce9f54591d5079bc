"""Streams that tell of changes until somebody stops listening: the load, and what the prefix cache holds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from pagecast.errors import from_rpc

V = TypeVar("V")


def is_task_cancelled() -> bool:
    """Whether a CancelledError met here is of the task itself. Else a call that it waits for was cancelled, for which gRPC raises the
    same; nobody who reads of that means the task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Watch(Generic[V]):
    """Iterate it; `cancel()`, leaving a `with` block or dropping it ends the watch. Ends by itself with the server, and raises an RpcError
    of pagecast.errors where the connection breaks."""

    def __init__(self, call: Any, read: Callable[[Any], V]) -> None:
        self._call = call
        self._read = read
        self._messages: Iterator[Any] = iter(call)
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> V:
        if self._is_over:
            raise StopIteration
        try:
            return self._read(next(self._messages))
        except grpc.RpcError as error:
            if self._is_over:
                raise StopIteration from None
            raise from_rpc(error) from None

    def cancel(self) -> None:
        """Stop listening; harmless a second time. An iteration that waits in another thread ends."""
        self._is_over = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncWatch(Generic[V]):
    """The same for an event loop."""

    def __init__(self, call: Any, read: Callable[[Any], V]) -> None:
        self._call = call
        self._read = read
        self._messages: AsyncIterator[Any] = call.__aiter__()
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> V:
        if self._is_over:
            raise StopAsyncIteration
        try:
            return self._read(await anext(self._messages))
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise StopAsyncIteration from None
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def cancel(self) -> None:
        """Stop listening; harmless a second time. An iteration that waits in another task ends."""
        self._is_over = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self._call.cancel()
