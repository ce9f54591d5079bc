"""The asynchronous client: the same values and errors on an event loop."""

import asyncio

import pytest
from client.fake_server import FakeServer

from pagecast import AsyncClient, errors, types


async def test_stream_and_generate(server: FakeServer) -> None:
    async with AsyncClient(server.target) as client:
        events = [event async for event in client.stream("hello")]
        result = await client.generate("hello")
    assert [type(event).__name__ for event in events] == ["Accepted", "Progress", "Tokens", "SequenceFinished", "Completed"]
    assert (result.text, result.token_ids) == ("ab", (7, 8))


async def test_the_other_calls(server: FakeServer) -> None:
    async with AsyncClient(server.target) as client:
        assert await client.tokenize("hi") == (104, 105)
        assert await client.detokenize([104, 105]) == "hi"
        assert (await client.render_chat([types.ChatMessage("user", "x")])).text == "<user>x"
        assert (await client.models())[0].name == "m"
        assert (await client.load()).kv_utilization == 0.5
        assert (await client.server_info()).epoch == 3
        assert await client.health("readiness") == "NOT_SERVING"


async def test_errors_are_typed(server: FakeServer) -> None:
    async with AsyncClient(server.target) as client:
        with pytest.raises(errors.InvalidRequest) as caught:
            [event async for event in client.stream("bad")]
        assert len(caught.value.violations) == 2
        with pytest.raises(errors.Unavailable) as busy:
            await client.generate("busy")
        assert busy.value.retry_after == 0.3
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("slow", timeout=0.2)


@pytest.mark.parametrize("way", ["cancel", "with", "break", "task"])
async def test_leaving_a_stream_cancels_it_on_the_server(server: FakeServer, way: str) -> None:
    async def read_one() -> None:
        async for event in client.stream("endless"):
            assert isinstance(event, types.Tokens)
            break

    async def read_all() -> None:
        async for _ in client.stream("endless"):
            reading.set()

    async with AsyncClient(server.target) as client:
        if way == "break":
            await read_one()
        elif way == "task":
            reading = asyncio.Event()
            task = asyncio.create_task(read_all())
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = client.stream("endless")
            await anext(stream)
            if way == "cancel":
                stream.cancel()
            else:
                async with stream:
                    await anext(stream)
        assert await asyncio.to_thread(server.script.cancelled.wait, 30)
