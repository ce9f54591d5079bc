"""Front ends that are killed or drained while they stream: the clients go on through another, token by token; and what operators see."""

import asyncio
import dataclasses
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.cli_server import LIMIT_S, PAGECAST, Served, pagecast, serve

from pagecast import AsyncClient, Client, SamplingParams, types
from pagecast.errors import Cancelled, InvalidRequest, NotFound, RequestIdInUse, Unavailable
from pagecast.v1 import admin_pb2 as admin
from pagecast.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from pagecast_worker.oracle import oracle_tokens

VOCAB = 2048
ORACLE = ("--executor", "oracle", "--oracle-vocab-size", str(VOCAB), "--max-model-len", "4096", "--num-blocks", "512")
PROMPT = list(range(1, 60))
LENGTH = 900


def run_dir_of(served: Served) -> Path:
    words = served.children()["scheduler"][0].cmdline()
    return Path(words[words.index("--run-dir") + 1])


@contextmanager
def second_frontend(served: Served) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One more front end of the cluster, on a port of its own."""
    run_dir = run_dir_of(served)
    words = ["frontend", "--run-dir", str(run_dir), "--model", "", "--port", "0", "--index", "1", "--drain-announce-s", "0"]
    process = subprocess.Popen([*PAGECAST, *words, "--drain-timeout-s", "0.2"], stderr=subprocess.DEVNULL)
    try:
        serving = run_dir / "frontend-1.serving"
        end = time.monotonic() + LIMIT_S
        while not serving.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        yield process, serving.read_text().strip()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(*ORACLE, "--oracle-step-us", "2000") as running:
        yield running


def expected(seed: int, sequence: int = 0, length: int = LENGTH) -> list[int]:
    return oracle_tokens(PROMPT, length, seed, sequence, vocab_size=VOCAB)


def sampling(seed: int, n: int = LENGTH) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=n, ignore_eos=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stream_goes_on_through_another_front_end(served: Served, number: signal.Signals) -> None:
    seed = int(number)
    with second_frontend(served) as (process, other), Client([other, served.address]) as client:
        chosen = [dataclasses.replace(sampling(seed + i), n=2 if i > 1 else None) for i in range(4)]
        streams = [client.stream(PROMPT, each) for each in chosen]  # round robin: two on each front end
        got: list[dict[int, list[int]]] = [{} for _ in streams]
        events: list[list[Any]] = [[] for _ in streams]

        def read(at: int) -> None:
            for event in streams[at]:
                events[at].append(event)
                if isinstance(event, types.Tokens):
                    ids = got[at].setdefault(event.sequence_index, [])
                    assert event.first_token_offset == len(ids)
                    ids += event.token_ids

        readers = [threading.Thread(target=read, args=(at,)) for at in range(len(streams))]
        for reader in readers:
            reader.start()
        end = time.monotonic() + LIMIT_S
        while not all([len(ids) > 20 for ids in list(outputs.values())] == [True] * (each.n or 1) for outputs, each in zip(got, chosen)):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        for reader in readers:
            reader.join(LIMIT_S)
    for at, outputs in enumerate(got):
        assert outputs == {index: expected(seed + at, index) for index in range(chosen[at].n or 1)}
        assert [event.seq for event in events[at]] == list(range(1, len(events[at]) + 1))
        assert isinstance(events[at][-1], types.Completed) and sum(isinstance(e, types.Accepted) for e in events[at]) == 1
        assert sum(isinstance(e, types.SequenceFinished) for e in events[at]) == len(outputs)


def test_a_front_end_that_was_stopped_for_long_goes_on_with_its_calls(served: Served) -> None:
    """The scheduler has given it up meanwhile, and what its requests put out then went to nobody."""
    answers: list[Any] = []
    with Client(served.address) as client:
        stream = client.stream(PROMPT, sampling(93, 4000), request_id="stopped")
        told = [next(stream) for _ in range(5)]
        asked = threading.Thread(target=lambda: answers.append(client.generate(PROMPT, sampling(94, 4000), request_id="whole")))
        asked.start()
        (process,) = served.children()["frontend"]
        until_open(served, 2)
        process.suspend()
        try:
            until_logged(served, "front end vanished")
        finally:
            process.resume()
        told += stream
        assert [i for event in told if isinstance(event, types.Tokens) for i in event.token_ids] == expected(93, length=4000)
        asked.join(LIMIT_S)
        assert list(answers[0].sequences[0].token_ids) == expected(94, length=4000)


def test_a_stream_waits_for_the_only_front_end_to_come_back(served: Served) -> None:
    with Client(served.address) as client:
        stream = client.stream(PROMPT, sampling(77))
        got: list[int] = []
        for event in stream:
            if isinstance(event, types.Tokens):
                if len(got) < 20 <= len(got) + len(event.token_ids):
                    served.children()["frontend"][0].kill()
                got += event.token_ids
        assert got == expected(77)


async def test_async_clients_go_on_join_and_cancel(served: Served) -> None:
    with second_frontend(served) as (process, other):
        async with AsyncClient([other, served.address]) as client, AsyncClient(served.address) as direct:
            streams = [client.stream(PROMPT, sampling(90), request_id=f"a-{i}") for i in range(2)]
            heads = [[await anext(stream) for _ in range(5)] for stream in streams]
            process.kill()
            for stream, head in zip(streams, heads, strict=True):
                rest = [event async for event in stream]
                assert [i for e in (*head, *rest) if isinstance(e, types.Tokens) for i in e.token_ids] == expected(90)
            doomed = direct.stream(PROMPT, sampling(91, 4000), request_id="doomed")
            await anext(doomed)
            with pytest.raises(RequestIdInUse):
                await anext(direct.stream(PROMPT, sampling(91, 4000), request_id="doomed"))
            joined = direct.stream(PROMPT, sampling(91, 4000), request_id="doomed", attach=True)
            assert (await anext(joined)).request_id == "doomed"  # type: ignore[union-attr]
            assert await direct.cancel("doomed")
            for stream in (doomed, joined):
                with pytest.raises(Cancelled) as caught:
                    async for _ in stream:
                        pass
                assert caught.value.reason == "BY_API"
            assert not await direct.cancel("doomed")
            with pytest.raises(NotFound):
                await direct.cancel("nobody")


async def test_a_detached_request_is_ended_by_a_word(served: Served) -> None:
    async with AsyncClient(served.address) as client, grpc.aio.insecure_channel(served.address) as channel:
        stream = client.stream(PROMPT, sampling(95, 3500), request_id="detached", detach_grace=60.0)
        while not isinstance(await anext(stream), types.Tokens):
            pass
        stream.cancel()
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as ended:  # else it goes on, and can be read to its end
            async for _ in stub.ResumeStream(generation_pb2.ResumeStreamRequest(request_id="detached"), timeout=LIMIT_S):
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        async with asyncio.timeout(LIMIT_S):
            while (await client.load()).num_running:
                await asyncio.sleep(0.05)


@pytest.fixture
async def operator(served: Served) -> Any:
    async with grpc.aio.insecure_channel(f"unix:{run_dir_of(served)}/admin-0.sock") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def test_operators_see_why_requests_wait(served: Served, operator: Any) -> None:
    async with AsyncClient(served.address) as client:
        streams = [client.stream(list(range(1, 1500)), sampling(i, 2500), request_id=f"w-{i}") for i in range(4)]
        for stream in streams:
            await anext(stream)
        async with asyncio.timeout(LIMIT_S):
            while True:
                page = await operator.ListRequests(admin.ListRequestsRequest())
                waits = {info.request_id: info.waiting for info in page.requests if info.HasField("waiting")}
                if any(wait.cause == admin.WAIT_CAUSE_BLOCKS for wait in waits.values()):
                    break
                await asyncio.sleep(0.02)
        assert page.total_size == 4
        blocked = next(wait for wait in waits.values() if wait.cause == admin.WAIT_CAUSE_BLOCKS)
        assert blocked.blocks_needed > blocked.blocks_free - 1 and f"{blocked.blocks_needed} free blocks" in blocked.explanation
        first = await operator.ListRequests(admin.ListRequestsRequest(page_size=3))
        second = await operator.ListRequests(admin.ListRequestsRequest(page_size=3, page_token=first.next_page_token))
        assert [info.request_id for info in (*first.requests, *second.requests)] == [info.request_id for info in page.requests]
        report = await operator.CheckInvariants(admin.CheckInvariantsRequest())
        assert report.ok and report.num_blocks == report.num_clean + report.num_cached + report.num_referenced and report.num_requests == 4
        ended = await operator.CancelRequests(admin.CancelRequestsRequest(request_ids=["w-0", "nobody"]))
        assert (list(ended.cancelled_request_ids), list(ended.unknown_request_ids)) == (["w-0"], ["nobody"])
        with pytest.raises(Cancelled) as caught:
            async for _ in streams[0]:
                pass
        assert caught.value.reason == "BY_ADMIN"
        await operator.CancelRequests(admin.CancelRequestsRequest(all=True))


async def test_drain_and_undrain(served: Served, operator: Any) -> None:
    async with AsyncClient(served.address) as client:
        running = client.stream(PROMPT, sampling(5, 2500))
        head = await anext(running)
        assert isinstance(head, types.Accepted)
        assert (await operator.Drain(admin.DrainRequest(announce={"seconds": 0}))).num_open == 1  # type: ignore[arg-type]
        async with asyncio.timeout(LIMIT_S):
            while await client.health() != "NOT_SERVING":
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(client.grpc_channel).Generate(requests_of(client))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [i async for e in running if isinstance(e, types.Tokens) for i in e.token_ids] == expected(5, length=2500)
        await operator.Undrain(admin.UndrainRequest())
        async with asyncio.timeout(LIMIT_S):
            while await client.health() != "SERVING":
                await asyncio.sleep(0.02)
        assert (await client.generate(PROMPT, sampling(5, 3))).token_ids == tuple(expected(5)[:3])


def requests_of(client: AsyncClient) -> Any:
    from pagecast import requests
    from pagecast.v1 import generation_pb2

    return generation_pb2.GenerateRequest(spec=requests.generation_spec(PROMPT, sampling(5, 3), {}))


async def test_cache_events_follow_the_cache(served: Served, operator: Any) -> None:
    async with AsyncClient(served.address) as client:
        watch = client.watch_cache_events(include_token_ids=True)
        first = await anext(watch)
        assert first.snapshot and first.block_size == 16
        while first.snapshot_continues:
            first = await anext(watch)
        prompt = [7] * 33 + [9] * 20
        await client.generate(prompt, sampling(1, 2), cache_scope="watched")
        known: dict[bytes, types.CachedBlock] = {}
        async with asyncio.timeout(LIMIT_S):
            while not any(list(block.token_ids) == prompt[32:48] for block in known.values()):
                last = await anext(watch)
                known |= {block.digest: block for block in last.stored}
        tail = next(block for block in known.values() if list(block.token_ids) == prompt[32:48])
        assert list(known[tail.parent].token_ids) == prompt[16:32] == list(known[known[tail.parent].parent].token_ids)
        assert (await operator.ResetPrefixCache(admin.ResetPrefixCacheRequest())).num_blocks >= 3
        for again in (watch, client.watch_cache_events(after=last)):
            gone: set[bytes] = set()
            async with asyncio.timeout(LIMIT_S), again:
                while not {tail.digest, tail.parent} <= gone:
                    told = await anext(again)
                    assert not told.snapshot
                    gone |= set(told.removed)
            with pytest.raises(StopAsyncIteration):
                await anext(again)
        async with client.watch_cache_events(after=dataclasses.replace(last, instance_id="another")) as stale:
            assert (await anext(stale)).snapshot


async def test_the_load_is_told_when_it_changes(served: Served) -> None:
    async with AsyncClient(served.address) as client:
        async with client.watch_load(min_interval=0.1) as watch:
            before = (await anext(watch)).output_tokens
            await client.generate(PROMPT, sampling(1, 5))
            async with asyncio.timeout(LIMIT_S):
                while (await anext(watch)).output_tokens < before + 5:
                    pass
        with pytest.raises(InvalidRequest) as caught:
            await anext(client.watch_load(min_interval=61.0))
        assert [violation.field for violation in caught.value.violations] == ["min_interval"]


def test_watches_without_an_event_loop(served: Served) -> None:
    with Client(served.address) as client, client.watch_load() as loads, client.watch_cache_events() as events:
        assert next(loads).instance_id == next(events).instance_id == client.server_info().instance_id
        waiting = threading.Thread(target=lambda: list(events))
        waiting.start()
        events.cancel()
        waiting.join(LIMIT_S)
        assert not waiting.is_alive()


def lines_of(served: Served, *words: str) -> list[str]:
    return [line for line in served.lines if all(word in line for word in words)]


def until_open(served: Served, count: int) -> None:
    """So many requests are open."""
    with Client(f"unix:{run_dir_of(served)}/admin-0.sock") as operator:
        end = time.monotonic() + LIMIT_S
        while len(list(operator.admin.requests())) < count:
            assert time.monotonic() < end
            time.sleep(0.05)


def until_logged(served: Served, *words: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not lines_of(served, *words):
        assert time.monotonic() < end, f"nothing logged {words}"
        time.sleep(0.05)


def test_workers_are_restarted_under_streams_and_logs_follow_the_level(served: Served) -> None:
    operators = f"unix:{run_dir_of(served)}/admin-0.sock"
    with Client(served.address) as client, Client(operators) as operator:
        assert operator.admin.set_log_level("error") == ""
        (before,) = served.children()["worker"]
        streams = [client.stream(PROMPT, sampling(40 + i), request_id=f"kept-{i}") for i in range(3)]
        heads: list[list[Any]] = [[] for _ in streams]
        for stream, head in zip(streams, heads, strict=True):
            while not head or not isinstance(head[-1], types.Tokens):
                head.append(next(stream))
        report = operator.admin.restart_workers()
        assert (report.num_ranks, report.num_requests) == (1, 3)
        events = [[*head, *stream] for stream, head in zip(streams, heads, strict=True)]
        for seed, told in enumerate(events, 40):
            assert [i for event in told if isinstance(event, types.Tokens) for i in event.token_ids] == expected(seed)
            assert isinstance(told[-1], types.Completed) and told[-1].num_recoveries == 1
        (after,) = served.children()["worker"]
        assert after.pid != before.pid
        quiet = client.server_info().epoch
        assert operator.admin.set_log_level("debug") == "error"
        client.generate(PROMPT, sampling(1, 2), request_id="told-of")
        until_logged(served, "request ended", "told-of")
        assert operator.admin.set_log_level("") == "debug"
        assert operator.admin.restart_workers().num_ranks == 1
        client.generate(PROMPT, sampling(1, 2))
        until_logged(served, "epoch started", f'"epoch": {quiet + 1}')
        until_logged(served, "epoch opened", f'"epoch": {quiet + 1}')
        for words in ("epoch started", "epoch opened"):  # by the worker, and by the scheduler
            assert not lines_of(served, words, f'"epoch": {quiet},') + lines_of(served, words, f'"epoch": {quiet}}}')
        assert operator.admin.check_invariants().ok


async def test_the_asynchronous_operator(served: Served) -> None:
    async with AsyncClient(served.address) as client, AsyncClient(f"unix:{run_dir_of(served)}/admin-0.sock") as operator:
        async with client.stream(PROMPT, sampling(3, 3000), request_id="open", labels={"team": "search"}) as stream:
            await anext(stream)
            (seen,) = [info async for info in operator.admin.requests()]
            assert (seen.request_id, seen.priority, seen.num_readers, seen.prompt_tokens) == ("open", "normal", 1, len(PROMPT))
            assert seen.labels == {"team": "search"}
            assert await operator.admin.drain(60.0) == 1 and await operator.admin.undrain() == 1
            report = await operator.admin.cancel(["open", "nobody"])
            assert (report.cancelled, report.finished, report.unknown) == (("open",), (), ("nobody",))
        totals = await operator.admin.check_invariants()
        assert totals.ok and totals.num_blocks == totals.num_clean + totals.num_cached + totals.num_referenced
        assert await operator.admin.reset_prefix_cache() == totals.num_cached
        with pytest.raises(ValueError):
            await operator.admin.set_log_level("loud")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as caught:
            await operator.admin.drain(7200.0)
        assert [violation.field for violation in caught.value.violations] == ["announce"]


def test_admin_rpcs_are_not_on_the_public_listener(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError) as caught:
        admin_pb2_grpc.AdminServiceStub(channel).Drain(admin.DrainRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_the_admin_command(served: Served) -> None:
    def act(*words: str) -> tuple[int, str]:
        done = pagecast("admin", *words, "--run-dir", str(run_dir_of(served)))
        return done.returncode, done.stdout + done.stderr

    with Client(served.address) as client, client.stream(PROMPT, sampling(3, 4000), request_id="seen") as stream:
        next(stream)
        code, text = act("requests")
        assert code == 0 and "seen" in text and "1 open" in text
        assert act("check")[0] == 0
        assert act("cancel", "seen") == (0, "1 ended, 0 had ended, 0 unknown\n")
        assert act("cancel", "nobody")[0] == 1
        code, text = act("cancel")
        assert code == 2 and "cancel takes request ids, or --all" in text
        assert act("log-level", "warning") == (0, "warning, default before\n")
        assert act("log-level", "default") == (0, "default, warning before\n")
        code, text = act("log-level", "loud")
        assert code == 2 and "debug" in text
        assert act("check", "this")[0] == 2
        assert act("restart-workers") == (0, "1 workers ended, 0 requests go on in new ones\n")


def test_a_second_signal_still_says_why_streams_end() -> None:
    with serve(*ORACLE, "--oracle-step-us", "2000", "--drain-timeout-s", "3600") as running, Client(running.address) as client:
        stream = client.stream(PROMPT, sampling(3, 3900), resume=False, request_id="cut")
        next(stream)
        running.process.terminate()
        while client.health() != "NOT_SERVING":
            time.sleep(0.02)
        running.process.terminate()
        with pytest.raises(Unavailable) as caught:
            list(stream)
        assert caught.value.reason == "DRAIN_TIMEOUT" and caught.value.metadata["request_id"] == "cut"
        assert caught.value.metadata["resumable"] == "true" and int(caught.value.metadata["last_seq"]) >= 1
        assert running.process.wait(LIMIT_S) == 0
