"""The asynchronous client: the same values and errors on an event loop."""

import asyncio
import inspect
from typing import Any

import pytest
from client.fake_server import FakeServer

from pagecast import AsyncClient, Client, errors, types
from pagecast.v1 import model_pb2, model_pb2_grpc


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
        assert (await client.models(timeout=30))[0].name == "m"
        assert (await client.load()).kv_utilization == 0.5
        assert (await client.server_info()).epoch == 3
        assert await client.health("readiness") == "NOT_SERVING"


async def test_every_method_takes_what_that_of_the_synchronous_client_takes(server: FakeServer) -> None:
    methods = {name: method for name, method in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert {"models", "load", "health", "generate"} <= methods.keys()
    for name, method in methods.items():
        taken = inspect.signature(getattr(AsyncClient, name)).parameters
        assert taken == inspect.signature(method).parameters, name
    assert {name for name in dir(Client) if name[0] != "_"} == {name for name in dir(AsyncClient) if name[0] != "_"}
    async with AsyncClient(server.target, metadata=[("a", "b")]) as client:
        models = model_pb2_grpc.ModelServiceStub(client.grpc_channel)
        assert (await models.ListModels(model_pb2.ListModelsRequest(), metadata=client.metadata)).models[0].name == "m"
        assert ("a", "b") in client.metadata


LIMITED: list[tuple[str, tuple[Any, ...]]] = [
    ("models", ()), ("load", ()), ("server_info", ()), ("health", ()), ("tokenize", ("hi",)), ("detokenize", ([104],)),
    ("count_tokens", ("hi",)), ("render_chat", ([types.ChatMessage("user", "x")],)), ("cancel", ("r",)), ("generate", ("hello",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), LIMITED, ids=[name for name, _ in LIMITED])
async def test_every_call_keeps_to_its_timeout(server: FakeServer, name: str, arguments: tuple[Any, ...]) -> None:
    async with AsyncClient(server.target) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await getattr(client, name)(*arguments, timeout=-1)
    with Client(server.target) as plain, pytest.raises(errors.DeadlineExceeded):
        getattr(plain, name)(*arguments, timeout=-1)


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


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_stream_that_another_task_ends_raises_cancelled_and_leaves_the_reader_alone(server: FakeServer, way: str) -> None:
    """gRPC raises CancelledError there, which a task that nobody cancelled would end by without a word."""
    async with AsyncClient(server.target) as client:
        stream, reading = client.stream("endless"), asyncio.Event()

        async def read() -> str:
            with pytest.raises(errors.Cancelled):
                async for _ in stream:
                    reading.set()
            return "goes on"

        task = asyncio.create_task(read())
        await reading.wait()
        await client.close() if way == "close" else stream.cancel()
        assert await asyncio.wait_for(task, 60) == "goes on"


async def test_a_call_whose_client_is_closed_raises_cancelled(server: FakeServer) -> None:
    client = AsyncClient(server.target)
    task = asyncio.create_task(client.generate("slow"))
    while not server.script.asked:
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await asyncio.wait_for(task, 60)


async def test_a_stream_that_waits_for_its_server_can_be_left() -> None:
    """It must not begin anew after that, nor wait on."""
    server = FakeServer()
    async with AsyncClient(server.target) as client:
        stream = client.stream("endless")
        await anext(stream)
        server.close()

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        while not stream._position._num_failures:
            await asyncio.sleep(0.01)
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            await asyncio.wait_for(task, 60)
