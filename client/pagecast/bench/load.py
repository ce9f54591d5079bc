"""The load generator: offers requests at a Poisson rate or all at once, and times every token from the scheduled arrival.

Works against our own gRPC API and against any OpenAI-compatible server, with the same prompts and lengths.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pagecast.bench.results import percentiles


@dataclass(frozen=True)
class Ask:
    """One request to send. arrival: seconds after the start; 0 for all where the load is unbounded."""

    prompt: str
    output_tokens: int
    arrival: float


@dataclass
class Timeline:
    """Seconds since the start of the run. marks: (time, tokens gained) per message, so coalescing can be stated."""

    scheduled: float
    marks: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.marks)


class Target(Protocol):
    """Something that streams: yields how many tokens each message brought."""

    def stream(self, ask: Ask) -> AsyncIterator[int]: ...

    async def close(self) -> None: ...


class GrpcTarget:
    """Our server, through the public asynchronous client."""

    def __init__(self, address: str) -> None:
        from pagecast.async_client import AsyncClient

        self._client = AsyncClient(address)

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        from pagecast.sampling import SamplingParams
        from pagecast.types import Tokens

        params = SamplingParams(temperature=1.0, max_tokens=ask.output_tokens, ignore_eos=True)
        async for event in self._client.stream(ask.prompt, params):
            if isinstance(event, Tokens):
                yield len(event.token_ids)

    async def close(self) -> None:
        await self._client.close()


class OpenAITarget:
    """Any server with /v1/completions. Counts tokens by the usage field that each chunk or the last one carries."""

    def __init__(self, url: str) -> None:
        import httpx

        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=unlimited)
        self._model = ""

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        if not self._model:
            self._model = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        body = {
            "model": self._model, "prompt": ask.prompt, "max_tokens": ask.output_tokens, "temperature": 1.0, "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        seen = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                usage = json.loads(line[6:]).get("usage") or {}
                total = usage.get("completion_tokens", seen)
                if total > seen:
                    yield total - seen
                    seen = total

    async def close(self) -> None:
        await self._http.aclose()


def poisson_asks(prompts: list[str], outputs: list[int], rate: float | None, seed: int) -> list[Ask]:
    """Arrivals at `rate` a second (exponential gaps), or all at time 0 when rate is None."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(prompts)) if rate else np.zeros(len(prompts))
    return [Ask(prompt, count, float(at)) for prompt, count, at in zip(prompts, outputs, np.cumsum(gaps), strict=True)]


async def run_load(target: Target, asks: list[Ask], start: float | None = None) -> tuple[list[Timeline], float]:
    """Sends every ask at its time after `start`, seconds of the monotonic clock (None: now). Returns a timeline each and the seconds
    until the last ended."""
    start = time.monotonic() if start is None else start

    async def one(ask: Ask) -> Timeline:
        line = Timeline(ask.arrival)
        await asyncio.sleep(max(0.0, ask.arrival - (time.monotonic() - start)))
        try:
            async for count in target.stream(ask):
                line.marks.append((time.monotonic() - start, count))
        except Exception as error:
            line.error = type(error).__name__
        return line

    lines = await asyncio.gather(*(one(ask) for ask in asks))
    return list(lines), time.monotonic() - start


def summarize(lines: list[Timeline], seconds: float, ttft_limit_ms: float | None, tpot_limit_ms: float | None) -> dict[str, Any]:
    """Latency figures in ms. TTFT from the scheduled arrival; TPOT = (last - first) / (tokens - 1); ITL: the gap before a message
    divided over its tokens, so a coalesced message of n tokens gives n equal gaps; coalescing is tokens per message."""
    good = [line for line in lines if line.marks and not line.error]
    ttft = [1e3 * (line.marks[0][0] - line.scheduled) for line in good]
    tpot = [1e3 * (line.marks[-1][0] - line.marks[0][0]) / (line.tokens - 1) if line.tokens > 1 else 0.0 for line in good]
    itl: list[float] = []
    for line in good:
        for (before, _), (at, count) in zip(line.marks, line.marks[1:]):
            itl += [1e3 * (at - before) / count] * count
    e2e = [1e3 * (line.marks[-1][0] - line.scheduled) for line in good]
    met = sum((ttft_limit_ms is None or first <= ttft_limit_ms) and (tpot_limit_ms is None or each <= tpot_limit_ms)
              for first, each in zip(ttft, tpot, strict=True))
    tokens = sum(line.tokens for line in good)
    return {
        "requests": len(lines), "failed": len(lines) - len(good), "seconds": round(seconds, 3), "out_tok_s": round(tokens / seconds, 1),
        "req_s": round(len(good) / seconds, 2), "ttft_ms": percentiles(ttft), "tpot_ms": percentiles(tpot), "itl_ms": percentiles(itl),
        "e2e_ms": percentiles(e2e), "goodput_req_s": round(met / seconds, 2),
        "tokens_per_message": round(tokens / max(1, sum(len(line.marks) for line in good)), 3),
    }
