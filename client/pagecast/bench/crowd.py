"""Many streams at once against one front end: readers that check every token's place, readers that stall, and what they cost the server.

Speaks gRPC with generated code alone, because a thousand streams of the typed client would measure that client.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import generation_pb2_grpc

STREAMS_PER_CONNECTION = 250
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Options of a client that takes in little ahead of its reader, so that one who does not read is felt by the server at once."""


@dataclass
class Tally:
    """What all readers saw together. gaps: seconds between the messages of a stream, where they are wanted. lost: streams that ended
    other than by their own length, or with tokens missing, with why."""

    messages: int = 0
    tokens: int = 0
    finished: int = 0
    lost: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Process:
    """CPU seconds and resident memory of another process of this machine."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """User and system time of all its threads so far."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / self._ticks

    def rss_mib(self) -> float:
        """Resident memory now."""
        return int((self._folder / "statm").read_text().split()[1]) * self._page / 2**20


class Crowd:
    """Connections to one server, enough for `streams` at once."""

    def __init__(self, target: str, streams: int, extra: Sequence[tuple[str, int]] = ()) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), *extra]
        count = -(-streams // STREAMS_PER_CONNECTION)
        self._channels = [grpc.aio.insecure_channel(target, options) for _ in range(count)]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]

    async def close(self) -> None:
        """Ends every connection and what runs on it."""
        for channel in self._channels:
            await channel.close()

    def open(self, number: int, tokens: int) -> Any:
        """A call for so many tokens, on the connection whose turn it is."""
        stopping = pb.StoppingOptions(max_output_tokens=tokens, ignore_eos=True)
        ids = pb.TokenIds(ids=[number % 1000 + 3, 7, 11, 13])
        spec = pb.GenerationSpec(prompt_token_ids=ids, stopping=stopping, output=pb.OutputOptions(text=False))
        return self._stubs[number % len(self._stubs)].GenerateStream(pb.GenerateStreamRequest(spec=spec))

    async def read(self, number: int, tokens: int, until: float, tally: Tally, keeps_gaps: bool) -> None:
        """Streams one after the other until the time (monotonic) is over; the last one is read to its end."""
        while time.monotonic() < until:
            try:
                await self._read_one(number, tokens, tally, keeps_gaps)
                tally.finished += 1
            except (grpc.aio.AioRpcError, ValueError) as error:
                tally.lost.append(error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error))
                return

    async def _read_one(self, number: int, tokens: int, tally: Tally, keeps_gaps: bool) -> None:
        """Raises ValueError for a stream with a gap or without its end."""
        seen, is_complete, last = 0, False, 0.0
        async for response in self.open(number, tokens):
            event = response.event
            kind = event.WhichOneof("event")
            tally.messages += 1
            if kind == "tokens":
                if event.tokens.first_token_offset != seen:
                    raise ValueError(f"tokens from {event.tokens.first_token_offset} on after {seen}")
                seen += len(event.tokens.token_ids)
                if keeps_gaps:
                    now = time.monotonic()
                    if last:
                        tally.gaps.append(now - last)
                    last = now
            is_complete = kind == "completed"
        if not is_complete or seen != tokens:
            raise ValueError(f"ended after {seen} of {tokens} tokens")
        tally.tokens += seen


async def run_readers(crowd: Crowd, count: int, tokens: int, seconds: float, keeps_gaps: bool = False) -> Tally:
    """So many readers, each with one stream open at any time, for so long."""
    tally = Tally()
    until = time.monotonic() + seconds
    await asyncio.gather(*(crowd.read(number, tokens, until, tally, keeps_gaps) for number in range(count)))
    return tally


async def sample_rss(process: Process, every_s: float, into: list[float]) -> None:
    """Notes the memory again and again, until cancelled."""
    while True:
        into.append(process.rss_mib())
        await asyncio.sleep(every_s)


async def stall(crowd: Crowd, count: int, tokens: int) -> list[Any]:
    """Streams that are opened, heard to be accepted, and never read again."""
    calls = [crowd.open(number, tokens) for number in range(count)]
    for call in calls:
        if (await call.read()) is grpc.aio.EOF:
            raise ValueError("a stream ended before it began")
    return calls
