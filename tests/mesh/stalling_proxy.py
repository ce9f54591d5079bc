"""A TCP proxy that can freeze: it keeps its connections, its kernel goes on acknowledging, and nothing is passed on."""

import asyncio
from typing import Self


class StallingProxy:
    """Between a client and a server. Use as `async with StallingProxy(address) as proxy`."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.server_closed = asyncio.Event()  # the server has closed its side

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        """From here on nothing passes, in either direction."""
        self._flows.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, server_writer]
        for source, sink, ended in ((reader, server_writer, None), (server_reader, writer, self.server_closed)):
            task = asyncio.create_task(self._pass(source, sink, ended))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, ended: asyncio.Event | None) -> None:
        try:
            while data := await source.read(65536):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            if ended is not None:
                ended.set()
