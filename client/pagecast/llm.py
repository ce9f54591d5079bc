"""LLM and AsyncLLM: a model inside a program. They start a cluster of their own, of the same processes as `pagecast serve`, and stop it."""

import asyncio
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from numbers import Integral
from typing import Any, Self, Unpack, cast

import grpc

from pagecast import answers, models, requests, types
from pagecast.async_client import AsyncClient, AsyncStream
from pagecast.channel import channel_options
from pagecast.errors import DeadlineExceeded, PagecastError, RpcError, from_status
from pagecast.many import MOST_BYTES, MOST_OPEN, Calls, ManyCall
from pagecast.resuming import Asking
from pagecast.sampling import SamplingParams
from pagecast.v1 import generation_pb2, generation_pb2_grpc

TOGETHER = 16
"""Requests that a front end is given at a time, of a list that is long enough for all: the first set out while those of others are made."""
_LATE_S = 0.5
"""After a request's deadline, of which the server says so by itself as long as it can."""

_PRIVATE = {"max_queued_requests": 1_000_000, "max_queued_tokens": (1 << 31) - 1, "log_level": "warning"}
"""A program's own queue is bounded by the program, and nobody reads a line for each of its calls."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output. stop_reason: the stop text or token id that ended it, None for another reason. logprobs: one for each id, if asked
    for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: types.FinishReason
    stop_reason: str | int | None
    logprobs: tuple[types.TokenLogprob, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[types.ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt. prompt is what was given: text, token ids or a conversation."""

    request_id: str
    prompt: requests.Prompt
    outputs: tuple[CompletionOutput, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    timings: types.Timings
    prompt_logprobs: tuple[types.TokenLogprob, ...] = ()

    @classmethod
    def of(cls, prompt: requests.Prompt, result: types.Generation) -> Self:
        outputs = tuple(
            CompletionOutput(s.index, s.text, s.token_ids, s.reason, s.matched_stop, s.logprobs, s.reasoning_text, s.tool_calls)
            for s in result.sequences
        )
        usage = result.usage
        return cls(
            result.request_id, prompt, outputs, usage.prompt_tokens, usage.cached_prompt_tokens, result.effective.seed, result.timings,
            result.prompt_logprobs,
        )


def front_ends() -> int:
    """How many front ends a program's own cluster has where it does not say: one keeps a processor busy with some thousand requests a
    second, which small models exceed."""
    processors = len(os.sched_getaffinity(0))
    return 4 if processors >= 16 else 2 if processors >= 8 else 1


def for_window(stubs: list[Any], window: int) -> list[Any]:
    """A stub for each call that so many open requests need, front ends in turn."""
    return stubs * -(-window // (MOST_OPEN * len(stubs)))


def longest_first(sampling: Sequence[SamplingParams | None]) -> list[int]:
    """Numbers of requests, those with the largest max_tokens first, then as they came."""
    most = [one.max_tokens if one is not None and isinstance(one.max_tokens, int) else math.inf for one in sampling]
    return sorted(range(len(most)), key=lambda number: -most[number])


OutputOf = Callable[[int, types.Generation], RequestOutput]
"""Makes the output of a request, by its number, of its result."""


class _Embedded:
    """A private cluster and its end. Options are those of `pagecast serve`, with underscores."""

    def __init__(
        self, model: str = models.DEFAULT_MODEL, *, tensor_parallel_size: int = 1, dtype: str = "auto", max_num_seqs: int = 256,
        max_model_len: int | None = None, enable_prefix_caching: bool = True, random_weights: str | None = None, executor: str = "torch",
        **options: Any,
    ) -> None:
        try:
            from pagecast import cluster
        except ModuleNotFoundError as error:
            hint = f"LLM and AsyncLLM need the package {error.name}; install it with: pip install 'pagecast[serve]'"
            raise ModuleNotFoundError(hint, name=error.name) from None

        chosen = cluster.settings(
            model, tensor_parallel_size=tensor_parallel_size, dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching, random_weights=random_weights, executor=executor,
            **_PRIVATE | {"num_frontends": front_ends()} | options,
        )
        self._cluster = cluster.PrivateCluster(chosen)
        self.target: str = self._cluster.target
        """Where the cluster listens, for further clients of this user."""
        # Also runs at the interpreter's exit, and when the object is dropped.
        self._end = weakref.finalize(self, self._cluster.close)


class LLM(_Embedded):
    """Generates for whole lists of prompts.

        with LLM("smollm2-135m", max_num_seqs=16) as llm:
            for output in llm.generate(["One", "Two"], SamplingParams(temperature=0, max_tokens=32)):
                print(output.outputs[0].text)
    """

    def __init__(self, model: str = models.DEFAULT_MODEL, *, max_num_seqs: int = 256, **options: Any) -> None:
        super().__init__(model, max_num_seqs=max_num_seqs, **options)
        self._window = max(64, 2 * max_num_seqs)
        # A subchannel pool of its own makes each channel a connection.
        arguments = channel_options([("grpc.use_local_subchannel_pool", 1)])
        self._channels = [grpc.insecure_channel(target, arguments) for target in self._cluster.targets]
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._calls = Calls(for_window(stubs, self._window), min(MOST_BYTES, self._cluster.max_message_bytes // 2))

    def generate(
        self, prompts: requests.Prompt | Sequence[requests.Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[requests.RequestOptions],
    ) -> list[RequestOutput]:
        """Results in the order of the prompts. Give one prompt or many, and one SamplingParams or one for each prompt.

        Many are of class "batch" unless `priority` says otherwise: all that counts is when the last one ends, so those with the largest
        max_tokens begin first, and prompts are computed no sooner than they must be.
        Raises the first RpcError met; the other requests are cancelled then. What is lost with a front end is asked for again.
        """
        many = listed(prompts)
        each: Sequence[SamplingParams | None]
        each = [sampling] * len(many) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling parameters")
        if len(many) > 1 and "priority" not in options:
            options["priority"] = "batch"
        order = longest_first(each) if options.get("priority") == "batch" else range(len(many))
        made = requests.Specs(options)
        specs = ((number, made.of(many[number], each[number])) for number in order)
        timeout = requests.timeout(options.get("timeout"))
        found = self._run(specs, len(many), timeout, lambda number, result: RequestOutput.of(many[number], result))
        return [found[number] for number in range(len(many))]

    def chat(
        self, conversations: requests.Chat | Sequence[requests.Chat], sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[requests.RequestOptions],
    ) -> list[RequestOutput]:
        """generate for one conversation or many, under the model's own chat template."""
        return self.generate(cast(Any, conversations), sampling, **options)

    def _run(
        self, specs: Iterator[tuple[int, generation_pb2.GenerationSpec]], count: int, timeout: float | None, output_of: OutputOf
    ) -> dict[int, RequestOutput]:
        """Keep a window of requests open, so that the batch is always full and the queue never long. Answers are read as they come, and
        outputs made of them, so that little is left to do after the last one. By the numbers that come with the specs."""
        calls = _Requests(self._calls, timeout, output_of)
        together = max(1, min(TOGETHER, self._window // 8, -(-count // self._calls.num_places)))
        try:
            while some := list(islice(specs, together)):
                calls.wait(self._window - len(some))
                calls.ask(some)
            calls.wait(0)
            return calls.outputs
        finally:
            calls.cancel()

    def close(self) -> None:
        """Stop the cluster. May be called again."""
        self._calls.close()
        for channel in self._channels:
            channel.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Requests:
    """The requests of one `generate`, over a call of many to each front end. outputs: of the answers that have come, by number.

    Threads that read the calls make an output of each answer, and wake the caller for what it waits for alone: of a list whose answers
    come at once, each would take it two changes of threads more."""

    def __init__(self, kept: Calls, timeout: float | None, output_of: OutputOf) -> None:
        self._kept, self._timeout, self._output_of = kept, timeout, output_of
        self._calls: list[ManyCall | None] = [None] * kept.num_places
        self._again: list[tuple[float, int]] = []  # a heap: when to ask again, whom
        self._changed = threading.Condition()  # guards what follows
        self._num_rounds = 0
        # Those without an answer, the earliest first, and in which round each was asked, which says what call it began with.
        self._asked: dict[int, tuple[generation_pb2.GenerationSpec, Asking, int]] = {}
        self._failed: deque[tuple[int, Exception]] = deque()
        self._awaited = 0
        self.outputs: dict[int, RequestOutput] = {}

    def ask(self, specs: Sequence[tuple[int, generation_pb2.GenerationSpec]]) -> None:
        """More requests, by number, of one front end. The next ones go to another."""
        with self._changed:
            for number, spec in specs:
                self._asked[number] = spec, Asking.of(self._timeout), self._num_rounds
        self._num_rounds += 1
        self._begin([number for number, _ in specs])

    def _begin(self, numbers: Sequence[int]) -> None:
        by_place: dict[int, list[generation_pb2.TaggedRequest]] = {}
        for number in numbers:
            spec, asking, place = self._asked[number]
            left = asking.begin()
            request = generation_pb2.TaggedRequest(tag=number, spec=spec)
            if left is not None:
                request.timeout.FromNanoseconds(max(1, round(left * 1e9)))
            place = (place + asking.num_losses) % len(self._calls)  # another front end, if there is one
            by_place.setdefault(place, []).append(request)
        for place, due in by_place.items():
            call = self._calls[place]
            if call is None or not call.send(due):
                self._calls[place] = self._kept.begin(place, due, self._take, self._lose)

    def _take(self, results: Sequence[generation_pb2.TaggedResult]) -> None:
        """Results have come, says a thread of a call's."""
        for result in results:
            number = result.tag
            if number not in self._asked:
                continue  # a server's mistake: nobody waits for it
            try:
                if not result.HasField("response"):
                    raise from_status(result.status)
                output = self._output_of(number, answers.generation(result.response))
            except Exception as error:
                with self._changed:
                    self._failed.append((number, error))
                    self._changed.notify()
                continue
            with self._changed:
                self.outputs[number] = output
                del self._asked[number]
                if len(self._asked) <= self._awaited:
                    self._changed.notify()

    def _lose(self, numbers: list[int], error: RpcError) -> None:
        """A call has ended without results of these."""
        with self._changed:
            self._failed.extend((number, error) for number in numbers)
            self._changed.notify()

    def wait(self, num_open: int) -> None:
        """Until at most so many requests are without an answer. Raises the RpcError of one that is not to be asked again, or what an answer
        could not be read for."""
        with self._changed:
            self._awaited = num_open
        while True:
            now = time.monotonic()
            due = []
            while self._again and self._again[0][0] <= now:
                due.append(heappop(self._again)[1])
            self._begin(due)
            with self._changed:
                ends = [self._again[0][0]] if self._again else []
                if self._timeout is not None and self._asked:
                    deadline = next(iter(self._asked.values()))[1].deadline
                    assert deadline is not None
                    if deadline + _LATE_S < now and not self._failed:
                        raise DeadlineExceeded("DEADLINE_EXCEEDED", "the request's timeout ran out")
                    ends.append(deadline + _LATE_S)
                wait = max(0.0, min(ends) - now) if ends else None
                self._changed.wait_for(lambda: self._failed or len(self._asked) <= num_open, wait)
                if self._failed:
                    number, failure = self._failed.popleft()
                elif len(self._asked) <= num_open:
                    return
                else:
                    continue  # one is to be asked again, or late
            if not isinstance(failure, RpcError):
                raise failure
            heappush(self._again, (time.monotonic() + self._asked[number][1].wait_after(failure), number))

    def cancel(self) -> None:
        """End what is open. Calls know these requests, which are to know none of them any more: nothing waits for the collector."""
        for place, call in enumerate(self._calls):
            if call is not None:
                self._kept.give_back(place, call)
        self._calls.clear()


class AsyncLLM(_Embedded):
    """A stream for each request. Made in a blocking way; then used within one event loop.

        async with AsyncLLM("smollm2-135m") as llm:
            async for event in llm.stream("Once upon a time", SamplingParams(max_tokens=32)):
                ...
    """

    _clients: deque[AsyncClient] | None = None

    def _connected(self) -> AsyncClient:
        """The front ends in turn."""
        if not self._end.alive:
            raise PagecastError("this AsyncLLM is closed")
        if self._clients is None:
            self._clients = deque(AsyncClient(target) for target in self._cluster.targets)
        self._clients.rotate(1)
        return self._clients[0]

    def stream(
        self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]
    ) -> AsyncStream:
        """The events of one request, as they come."""
        return self._connected().stream(prompt, sampling, **options)

    async def generate(
        self, prompt: requests.Prompt, sampling: SamplingParams | None = None, **options: Unpack[requests.RequestOptions]
    ) -> RequestOutput:
        """The whole result of one request. Asked for again if its front end is lost."""
        asking = Asking.of(requests.timeout(options.get("timeout")))
        while True:
            left = asking.begin()
            if left is not None:
                options["timeout"] = left
            try:
                return RequestOutput.of(prompt, await self._connected().generate(prompt, sampling, **options))
            except RpcError as error:
                wait = asking.wait_after(error)
            await asyncio.sleep(wait)

    async def close(self) -> None:
        """Stop the cluster. May be called again."""
        for client in self._clients or ():
            await client.close()
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def listed(prompts: requests.Prompt | Sequence[requests.Prompt]) -> list[requests.Prompt]:
    """One prompt or many as a list: text is one prompt, so are numbers (token ids) and messages (a conversation)."""
    is_one = isinstance(prompts, str) or not hasattr(prompts, "__len__")
    if is_one or (len(prompts) > 0 and isinstance(prompts[0], Integral | types.ChatMessage | Mapping)):
        return [cast(requests.Prompt, prompts)]
    return cast(list[requests.Prompt], list(prompts))
