"""A front end's life: drain, taken ports, slow readers, pinging clients, a scheduler that is replaced."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import FakeScheduler, Ready, finished, history
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend import engine_client, generation, scheduler_link, streams
from pagecast_scheduler.frontend.config import FrontendConfig, check
from pagecast_scheduler.frontend.errors import Reason
from pagecast_scheduler.frontend.namespace import derive, load_key
from pagecast_scheduler.frontend.principals import ANONYMOUS
from pagecast_scheduler.frontend.resuming import unknown_yet
from pagecast_scheduler.frontend.tokenizer import byte_alphabet
from pagecast_wire.control import Attach
from pagecast_wire.intake import Abort, Farewell, Pause, ServingState, StopAt, Submit


def spec(**fields: Any) -> pb.GenerationSpec:
    return pb.GenerationSpec(**{"prompt_token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})


def stream(rig: Rig, **fields: Any) -> Any:
    return rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=spec(**fields)))


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def collect(call: Any) -> tuple[list[int], str, list[Any]]:
    events = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events.append(response.event)
    tokens = [e.tokens for e in events if e.WhichOneof("event") == "tokens"]
    return [i for t in tokens for i in t.token_ids], "".join(t.text for t in tokens), events


@pytest.fixture
async def run_dir() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pc") as folder:
        yield Path(folder)


async def test_drain_finishes_what_is_open_and_refuses_what_is_new(run_dir: Path) -> None:
    rig = await start_rig(run_dir)
    watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    call = stream(rig)
    submit = await rig.scheduler.accept()
    await call.read()
    rig.frontend.end()
    ending = asyncio.create_task(rig.frontend.run_until_stopped())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: rig.frontend.state.is_draining)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details(caught.value)[1]["ErrorInfo"].reason == "DRAINING" and "RetryInfo" in details(caught.value)[1]
    await rig.scheduler.tokens(submit.key, 0, [104], finished(submit.key, 1))
    ids, _, events = await collect(call)
    assert ids == [104] and events[-1].WhichOneof("event") == "completed"
    async with asyncio.timeout(20):
        assert await ending is None
    assert await watch.read() is grpc.aio.EOF
    await rig.channel.close()
    await rig.scheduler.close()


async def test_while_announced_requests_are_still_taken(run_dir: Path) -> None:
    rig = await start_rig(run_dir, drain_announce_s=60.0)
    rig.frontend.end()
    ending = asyncio.create_task(rig.frontend.run_until_stopped())
    await until(lambda: rig.frontend.state.is_announcing_end)
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await call
    rig.frontend.end()
    async with asyncio.timeout(20):
        await ending
    await rig.channel.close()
    await rig.scheduler.close()


async def test_what_outlasts_the_drain_ends_with_a_status_and_an_abort(run_dir: Path) -> None:
    rig = await start_rig(run_dir, drain_timeout_s=0.3)
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    submit = await rig.scheduler.accept()
    rig.frontend.end()
    ending = asyncio.create_task(rig.frontend.run_until_stopped())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details(caught.value)[1]["ErrorInfo"].reason == "DRAIN_TIMEOUT"
    await ending
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [submit.key]
    await rig.channel.close()
    await rig.scheduler.close()


async def test_a_stalled_reader_pauses_its_request_and_loses_nothing(rig: Rig) -> None:
    call = stream(rig)
    submit = await rig.scheduler.accept()
    sent: list[int] = []
    block = [i % 512 for i in range(20_000)]
    for _ in range(400):
        await rig.scheduler.tokens(submit.key, len(sent), block)
        sent += block
        await asyncio.sleep(0)
        if rig.scheduler.all(Pause):
            break
    pause = await rig.scheduler.next(Pause)
    assert pause.paused
    reading = asyncio.create_task(collect(call))
    resumed = await rig.scheduler.next(Pause, 2)
    assert (resumed.key, resumed.paused) == (submit.key, False)
    await rig.scheduler.finish(finished(submit.key, len(sent)))
    ids, _, _ = await reading
    assert ids == sent


async def test_a_stop_of_the_front_end_itself_is_no_fault_of_a_reader(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is stuck while the process stands still for longer than any reader or scheduler may be silent."""
    ticks, ahead_s = asyncio.Semaphore(0), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    for module in (engine_client, generation, scheduler_link, streams):
        monkeypatch.setattr(module, "time", clock)
    watch, writes = streams.RequestStream.watch, [None, None]

    def counted(watched: Any, *args: Any) -> None:
        writes.append(watched.writing_since)
        watch(watched, *args)
        assert watched.failure is None
        ticks.release()

    monkeypatch.setattr(streams.RequestStream, "watch", counted)
    call = stream(rig)
    submit = await rig.scheduler.accept()
    num_sent = 0
    while writes[-1] is None or writes[-1] != writes[-2]:
        await rig.scheduler.tokens(submit.key, num_sent, [7] * 20_000)
        num_sent += 20_000
        await asyncio.sleep(0.005)
    ahead_s[0] = 1000.0
    while not ticks.locked():
        await ticks.acquire()
    async with asyncio.timeout(60):
        for _ in range(3):
            await ticks.acquire()
    reading = asyncio.create_task(collect(call))
    await rig.scheduler.next(Pause, 2)
    await rig.scheduler.finish(finished(submit.key, num_sent))
    ids, _, _ = await reading
    assert len(ids) == num_sent


async def test_a_reader_that_never_reads_is_ended(run_dir: Path) -> None:
    rig = await start_rig(run_dir, slow_consumer_timeout_s=0.5)
    call = stream(rig)
    submit = await rig.scheduler.accept()
    offset = 0
    while not rig.scheduler.all(Abort) and offset < 8_000_000:
        await rig.scheduler.tokens(submit.key, offset, [7] * 20_000)
        offset += 20_000
        await asyncio.sleep(0.005)
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [submit.key]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert details(caught.value)[1]["ErrorInfo"].reason == "SLOW_CONSUMER"
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stop_rig(rig)


async def test_a_reader_is_not_slow_for_having_much_to_take(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gathered becomes several events, and each is taken in two thirds of the time that one may need; then one is not."""
    now = [0.0]
    for module in (generation, streams):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    attach = Attach(0, "caller", "r")
    opened = streams.RequestStream(*unknown_yet(attach, ANONYMOUS), lambda message: None, True, attach_to=attach)

    async def write(seconds: float) -> None:
        now[0] += seconds
        opened.watch(now[0], 60.0, False)

    servicer = generation.GenerationServicer(rig.frontend.state)
    await servicer._write(opened, SimpleNamespace(write=write), [40.0, 40.0, 40.0])
    assert opened.failure is None and opened.writing_since is None
    await servicer._write(opened, SimpleNamespace(write=write), [61.0])
    assert opened.failure is not None and opened.failure.reason is Reason.SLOW_CONSUMER


async def test_a_client_that_pings_every_second_stays_connected(rig: Rig) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 1000),
    ]
    async with grpc.aio.insecure_channel(rig.frontend.address, options=options) as channel:
        from pagecast.v1 import generation_pb2_grpc

        call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest(spec=spec()))
        submit = await rig.scheduler.accept()
        await call.read()
        quiet_until = time.monotonic() + 8
        while time.monotonic() < quiet_until:
            await asyncio.sleep(0.5)
            assert not call.done()
        await rig.scheduler.tokens(submit.key, 0, [104], finished(submit.key, 1))
        ids, _, _ = await collect(call)
        assert ids == [104]


async def test_a_replaced_scheduler_gets_open_requests_with_their_history(rig: Rig) -> None:
    calls = [stream(rig, stopping=pb.StoppingOptions(max_output_tokens=6)), stream(rig, stopping=pb.StoppingOptions(max_output_tokens=6))]
    first = await rig.scheduler.accept(1)
    second = await rig.scheduler.accept(2)
    await rig.scheduler.tokens(first.key, 0, [104, 105])
    waiting = [asyncio.create_task(collect(call)) for call in calls]
    await until(lambda: any(s.num_emitted == 2 for s in rig.frontend.state.engine.calls))
    new = await rig.restart_scheduler()
    await new.next(Ready)
    assert new.hellos[0].slot == 1
    again = {m.key: m for m in new.all(Submit)}
    assert set(again) == {first.key, second.key}
    assert history(again[first.key]) == [104, 105] and history(again[second.key]) == []
    assert isinstance(new.received[-1], Ready) and again[first.key].sampling == first.sampling
    await new.accept(1)
    await new.tokens(first.key, 0, [104, 105, 106])
    await new.tokens(first.key, 3, [107, 108, 109], finished(first.key, 6))
    await new.tokens(second.key, 0, [50] * 6, finished(second.key, 6))
    results = sorted([await task for task in waiting], key=lambda r: r[0][0])
    assert [r[0] for r in results] == [[50] * 6, [104, 105, 106, 107, 108, 109]]
    assert [r[1] for r in results] == ["2" * 6, "hijklm"]
    for _, _, events in results:
        assert [e.WhichOneof("event") for e in events].count("accepted") == 1


async def test_output_that_was_complete_is_not_asked_for_again(rig: Rig) -> None:
    lengthy = stream(rig, stopping=pb.StoppingOptions(max_output_tokens=2))
    a = await rig.scheduler.accept(1)
    stopped = stream(rig, stopping=pb.StoppingOptions(stop_texts=["b"]))
    b = await rig.scheduler.accept(2)
    ended = stream(rig)
    c = await rig.scheduler.accept(3)
    await rig.scheduler.tokens(a.key, 0, [104, 105])
    await rig.scheduler.tokens(b.key, 0, list(b"ab"))
    await rig.scheduler.tokens(c.key, 0, [104, 2])
    await rig.scheduler.next(StopAt)
    await until(lambda: sum(s.sequences[0].num_output_tokens for s in rig.frontend.state.engine.calls) == 6)
    new = await rig.restart_scheduler()
    await new.next(Ready)
    assert new.all(Submit) == []
    ends = [(await collect(call))[2][-2].sequence_finished for call in (lengthy, stopped, ended)]
    assert [e.reason for e in ends] == [pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP, pb.FINISH_REASON_STOP]
    assert ends[1].stop_text == "b" and ends[2].stop_token_id == 2


async def test_a_silent_scheduler_is_not_serving_and_a_lost_one_ends_its_streams(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = health_pb2_grpc.HealthStub(rig.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    call = stream(rig)
    submit = await rig.scheduler.accept()
    await rig.scheduler.tokens(submit.key, 0, [104, 105])
    await call.read()
    await call.read()
    await rig.scheduler.close()
    monkeypatch.setattr(scheduler_link, "SILENT_AFTER_S", 0.5)
    async with asyncio.timeout(20):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.Generate(pb.GenerateRequest(spec=spec()))
    assert details(caught.value)[1]["ErrorInfo"].reason == "RECOVERING"
    assert not call.done()
    monkeypatch.setattr(engine_client, "LOST_AFTER_S", 0.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    info = details(caught.value)[1]["ErrorInfo"]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert info.reason == "SCHEDULER_LOST" and info.metadata["emitted_tokens"] == "2"
    rig.scheduler = FakeScheduler(rig.run_dir, "three")
    await rig.scheduler.next(Ready)
    assert rig.scheduler.all(Submit) == []
    monkeypatch.undo()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_before_the_engine_is_known_calls_are_refused_as_starting(run_dir: Path) -> None:
    from pagecast_scheduler.frontend.main import Frontend

    frontend = Frontend(FrontendConfig(run_dir=str(run_dir), port=0, drain_announce_s=0))
    await frontend.start()
    assert (run_dir / "frontend-0.address").read_text().strip() == frontend.address
    assert not (run_dir / "frontend-0.serving").exists()
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        from pagecast.v1 import generation_pb2_grpc

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=spec()))
        assert details(caught.value)[1]["ErrorInfo"].reason == "STARTING"
        scheduler = FakeScheduler(run_dir)
        scheduler.state = ServingState.STARTING
        await scheduler.until(lambda: scheduler.hellos)
        await until(lambda: frontend.state.engine.status is not None)
        assert not (run_dir / "frontend-0.serving").exists()
        await scheduler.set_state(ServingState.SERVING)
        await until((run_dir / "frontend-0.serving").exists)
    frontend.end()
    await frontend.run_until_stopped()
    await scheduler.close()


START = "import sys; from pagecast_scheduler.frontend.config import FrontendConfig; from pagecast_scheduler.frontend.main import run; "


def role(run_dir: Path, arguments: str) -> "subprocess.Popen[str]":
    code = f"{START}sys.exit(run(FrontendConfig(run_dir={str(run_dir)!r}, {arguments})))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_taken_port_is_one_line_and_exit_code_2(run_dir: Path, host: str) -> None:
    rig = await start_rig(run_dir, host=host)
    port = int(rig.frontend.address.rsplit(":", 1)[1])
    second = role(run_dir, f"host={host!r}, port={port}, index=1")
    _, error = await asyncio.to_thread(second.communicate, timeout=60)
    assert second.returncode == 2
    lines = [line for line in error.splitlines() if line.startswith("pagecast")]
    assert len(lines) == 1 and str(port) in lines[0] and "Traceback" not in error
    await stop_rig(rig)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [("port=0, host='0.0.0.0'", "plaintext"), ("port=70000", "port"), ("port=0, model='/nowhere/x.gguf'", "/nowhere/x.gguf")],
)
async def test_a_start_that_cannot_work_is_one_line_and_exit_code_2(run_dir: Path, arguments: str, word: str) -> None:
    process = role(run_dir, arguments)
    _, error = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 2 and word in error and len(error.strip().splitlines()) == 1


def tiny_folder(path: Path) -> Path:
    """A Hugging Face folder that transformers can read: every byte is a token."""
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.mark.parametrize("has_folder", [False, True])
async def test_sigterm_ends_the_process_cleanly_and_without_heavy_imports(run_dir: Path, has_folder: bool) -> None:
    scheduler = FakeScheduler(run_dir)
    model = str(tiny_folder(run_dir / "model")) if has_folder else ""
    process = role(run_dir, f"port=0, drain_announce_s=0.0, model={model!r}")
    await scheduler.until(lambda: scheduler.hellos)
    await until((run_dir / "frontend-0.serving").exists)
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in loaded
    os.kill(process.pid, signal.SIGTERM)
    _, error = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    await scheduler.next(Farewell)
    await scheduler.close()


def test_plaintext_beyond_this_machine_needs_a_word_of_consent() -> None:
    assert check(FrontendConfig("/x", host="0.0.0.0")) is not None
    assert check(FrontendConfig("/x", host="0.0.0.0", insecure=True)) is None
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        assert check(FrontendConfig("/x", host=host)) is None


@pytest.mark.parametrize(("seconds", "good"), [(0.0, True), (86_400.0, True), (-0.5, False), (86_400.5, False), (float("nan"), False)])
def test_a_stream_may_be_left_for_a_day_at_most(seconds: float, good: bool) -> None:
    problem = check(FrontendConfig("/x", max_detach_grace_s=seconds))
    assert problem == (None if good else f"max_detach_grace_s must be 0 to 86400, not {seconds}")


def test_the_namespace_key_is_made_once_and_separates_callers(tmp_path: Path) -> None:
    key = load_key(tmp_path)
    assert load_key(tmp_path) == key and len(key) == 32
    assert (tmp_path / "namespace.key").stat().st_mode & 0o777 == 0o600 and len(list(tmp_path.iterdir())) == 1
    given = [
        ("", "d", "", ""), ("", "d", "", "s"), ("", "d", "s", ""), ("a", "d", "", ""), ("", "e", "", ""), ("d", "", "", ""),
        ("ad", "", "", ""),
    ]  # fmt: skip
    parts = {derive(key, *p) for p in given}
    assert len(parts) == len(given) and all(len(p) == 32 for p in parts)
