"""Several asynchronous streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of every stream. The first error ends all of them; so does leaving early."""
    if len(streams) == 1:
        async for item in streams[0]:
            yield item
        return
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
