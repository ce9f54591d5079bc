"""What stands before every handler: metadata rules, trace context, limits, load reports, spans and the log line of a call."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from frontend.conftest import Rig, details, start_rig, stop_rig
from frontend.fake_scheduler import finished
from frontend.raw_http2 import RawClient, grpc_frame
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3 import orca_pb2

from pagecast.v1 import generation_pb2 as pb
from pagecast.v1 import runtime_pb2, runtime_pb2_grpc
from pagecast_scheduler.frontend.call_context import is_tracestate, parse_traceparent, read_metadata
from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.errors import Refusal
from pagecast_scheduler.frontend.listeners import connection_cap
from pagecast_scheduler.frontend.tracing import OtlpSpans, spans_to
from pagecast_wire.intake import Abort, Priority, Submit

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def generate(rig: Rig, *metadata: tuple[str, str], **fields: Any) -> Any:
    spec = pb.GenerationSpec(**{"prompt_token_ids": pb.TokenIds(ids=[5, 6, 7]), **fields})
    return rig.generation.Generate(pb.GenerateRequest(spec=spec), metadata=metadata)


async def answer(rig: Rig, call: Any, count: int) -> Submit:
    submit = await rig.scheduler.accept(count)
    await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
    await call
    return submit


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("metadata", "fields"),
    [
        ([("traceparent", "00-x")], ["traceparent"]), ([("traceparent", f"ff-{TRACE}-{PARENT}-01")], ["traceparent"]),
        ([("traceparent", f"00-{'0' * 32}-{PARENT}-01")], ["traceparent"]),
        ([("traceparent", f"00-{TRACE}-{'0' * 16}-01")], ["traceparent"]),
        ([("traceparent", TRACEPARENT + "-more")], ["traceparent"]), ([("traceparent", TRACEPARENT.upper())], ["traceparent"]),
        ([("tracestate", "no equals")], ["tracestate"]), ([("tracestate", "a=1,a=2")], ["tracestate"]),
        ([("x-request-id", "a"), ("x-request-id", "b")], ["x-request-id"]), ([("x-request-id", "a b")], ["x-request-id"]),
        ([("x-request-id", "a" * 129)], ["x-request-id"]), ([("pagecast-priority", "highest")], ["pagecast-priority"]),
        ([("pagecast-priority", "batch"), ("pagecast-priority", "batch")], ["pagecast-priority"]),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], ["authorization"]),
        ([("x-request-id", " "), ("pagecast-priority", "")], ["x-request-id", "pagecast-priority"]),
    ],
)  # fmt: skip
async def test_repeated_or_malformed_metadata_is_named(rig: Rig, metadata: list[tuple[str, str]], fields: list[str]) -> None:
    error = await failure(generate(rig, *metadata))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = details(error)[1]
    assert [v.field for v in found["BadRequest"].field_violations] == [f"metadata.{field}" for field in fields]
    assert found["ErrorInfo"].reason == "FIELD_VIOLATION" and rig.scheduler.all(Submit) == []


async def test_priority_and_request_id_in_metadata_count_where_the_spec_is_silent(rig: Rig) -> None:
    given_id = (("x-request-id", "from-metadata"), ("pagecast-priority", "batch"))
    call = generate(rig, *given_id)
    assert (await answer(rig, call, 1)).priority == Priority.BATCH
    assert dict(await call.initial_metadata())["x-request-id"] == "from-metadata" == (await call).request_id
    call = generate(rig, *given_id, request_id="from-spec", scheduling=pb.SchedulingOptions(priority=pb.PRIORITY_INTERACTIVE))
    assert (await answer(rig, call, 2)).priority == Priority.INTERACTIVE
    assert (await call).request_id == "from-spec"


async def test_a_callers_trace_goes_on_in_the_log_line(rig: Rig, logged: list[dict[str, Any]]) -> None:
    await answer(rig, generate(rig, ("traceparent", TRACEPARENT), ("tracestate", "v=1"), ("x-request-id", "r1")), 1)
    await failure(generate(rig, model="other"))
    async with asyncio.timeout(20):
        while len([line for line in logged if line["event"] == "call"]) < 2:  # the caller hears of the end before it is logged
            await asyncio.sleep(0.01)
    good, bad = [line for line in logged if line["event"] == "call"]
    assert (good["code"], good["trace_id"], good["request_id"]) == ("OK", TRACE, "r1") and good["span_id"] not in (PARENT, "")
    assert (bad["code"], bad["method"]) == ("NOT_FOUND", "/pagecast.v1.GenerationService/Generate")
    assert bad["trace_id"] != TRACE and len(bad["trace_id"]) == 32


@given(st.text(max_size=80))
def test_no_text_upsets_the_readers_of_trace_context(text: str) -> None:
    trace = parse_traceparent(text, "")
    assert trace is None or (len(trace.trace_id), len(trace.span_id)) == (32, 16)
    assert is_tracestate(text) in (True, False)


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "x-request-id", "authorization", "pagecast-priority", "x-y"]),
                          st.text(max_size=40) | st.binary(max_size=10) | st.just(TRACEPARENT)), max_size=6))  # fmt: skip
def test_metadata_is_read_or_refused_by_key(metadata: list[tuple[str, Any]]) -> None:
    try:
        read_metadata(metadata)
    except Refusal as refusal:
        assert refusal.violations and all(v.field.startswith("metadata.") for v in refusal.violations)


def test_the_state_of_a_trace_has_rules_of_its_own() -> None:
    assert is_tracestate("") and is_tracestate("a=1, b@c=2 ,,") and is_tracestate(",".join(f"k{i}=v" for i in range(32)))
    for wrong in (",".join(f"k{i}=v" for i in range(33)), "A=1", "a=", "=1", "a=1\x7f"):
        assert not is_tracestate(wrong), wrong
    later = parse_traceparent(f"cc-{TRACE}-{PARENT}-01-what-comes-later", "")
    assert later is not None and later.is_sampled and later.parent_id == PARENT


async def test_metadata_over_the_limit_is_refused(rig: Rig) -> None:
    error = await failure(generate(rig, ("x-other", "x" * (17 << 10))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await answer(rig, generate(rig, ("x-other", "x" * (8 << 10))), 1)


async def test_one_call_too_many_on_a_connection_is_refused_at_once_with_advice(folder: Path) -> None:
    rig = await start_rig(folder, max_streams_per_connection=3)
    calls, keys = [], []
    for count in (1, 2, 3):
        calls.append(generate(rig))
        keys.append((await rig.scheduler.accept(count)).key)
    error = await failure(generate(rig))
    found = details(error)[1]
    assert error.code() is grpc.StatusCode.UNAVAILABLE and found["ErrorInfo"].reason == "OVERLOADED" and "RetryInfo" in found
    assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
    async with grpc.aio.insecure_channel(rig.frontend.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
        load = runtime_pb2_grpc.RuntimeServiceStub(other).GetLoad(runtime_pb2.GetLoadRequest())
        assert (await load).num_running == 1  # another connection has room
    await rig.scheduler.tokens(keys[0], 0, [1], finished(keys[0], 1))
    await calls[0]
    open_calls = rig.frontend._public.interceptor._connections._open
    async with asyncio.timeout(20):
        while sum(open_calls.values()) > 2:  # the caller hears of the end before the server has left it behind
            await asyncio.sleep(0.01)
    await answer(rig, generate(rig), 4)
    for key, call in zip(keys[1:], calls[1:]):
        await rig.scheduler.tokens(key, 0, [1], finished(key, 1))
        await call
    await stop_rig(rig)


async def test_a_flood_of_connections_leaves_the_reserved_listeners_alone(folder: Path) -> None:
    rig = await start_rig(folder, max_connections=20, probe_port=0)
    host, port = rig.frontend.address.rsplit(":", 1)
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    assert rig.frontend._probes is not None
    for address in (rig.frontend._probes.address, f"unix:{folder}/admin-0.sock"):
        async with grpc.aio.insecure_channel(address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=20) == b"\x08\x01"
    closed = 0
    for reader, _ in silent:
        try:
            # A connection over the cap ends without a word; one under it gets the server's HTTP/2 settings.
            closed += not await asyncio.wait_for(reader.read(9), 5)
        except (TimeoutError, ConnectionResetError):
            closed += 1
    assert closed >= 20
    for _, writer in silent:
        writer.close()
    await stop_rig(rig)


def test_the_cap_of_connections_leaves_room_for_everything_else() -> None:
    assert connection_cap(FrontendConfig("/x"), 1024) == 1024 - 320
    assert connection_cap(FrontendConfig("/x"), 100) == 16
    assert connection_cap(FrontendConfig("/x", max_connections=7), 1024) == 7


async def test_answers_carry_the_load_of_the_replica(rig: Rig) -> None:
    """Read from the wire: gRPC's C core keeps this trailer for its balancers and shows it to no application."""
    spec = pb.GenerationSpec(prompt_text="x")
    requests = {"Generate": pb.GenerateRequest(spec=spec), "GenerateStream": pb.GenerateStreamRequest(spec=spec)}
    async with RawClient(rig.frontend.address) as raw:
        for count, (method, request) in enumerate(requests.items(), start=1):
            call = asyncio.create_task(raw.call(f"/pagecast.v1.GenerationService/{method}", grpc_frame(request.SerializeToString())))
            submit = await rig.scheduler.accept(count)
            await rig.scheduler.tokens(submit.key, 0, [1], finished(submit.key, 1))
            trailers = (await call).trailers
            report = OrcaLoadReport.FromString(base64.b64decode(trailers["endpoint-load-metrics-bin"] + "=="))
            assert trailers["grpc-status"] == "0" and report.application_utilization == 0.25
            assert dict(report.named_metrics)["num_requests_running"] == 1


async def test_a_balancer_can_watch_the_load(rig: Rig) -> None:
    watch: Any = rig.channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=orca_pb2.OrcaLoadReportRequest.SerializeToString, response_deserializer=OrcaLoadReport.FromString,
    )  # fmt: skip
    intervals = Duration(nanos=1), Duration(seconds=1 << 62)
    often, once = (watch(orca_pb2.OrcaLoadReportRequest(report_interval=interval)) for interval in intervals)
    for reports in (often, often, often, once):
        report = await reports.read()
        assert report.mem_utilization == 0.25 and set(report.named_metrics) >= {"kv_cache_usage", "num_requests_waiting"}
    often.cancel()
    once.cancel()


@pytest.fixture
async def traced(rig: Rig) -> AsyncIterator[tuple[Rig, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    spans = OtlpSpans(SimpleSpanProcessor(exporter), Resource.create({"service.name": "test"}))
    rig.frontend._public.interceptor._spans = spans
    yield rig, exporter


async def test_a_span_per_call_hangs_under_the_callers(traced: tuple[Rig, InMemorySpanExporter]) -> None:
    rig, exporter = traced
    await answer(rig, generate(rig, ("traceparent", TRACEPARENT), ("tracestate", "v=1")), 1)
    (span,) = exporter.get_finished_spans()
    context = span.get_span_context()
    assert context is not None and span.parent is not None
    assert (f"{context.trace_id:032x}", f"{span.parent.span_id:016x}", span.parent.is_remote) == (TRACE, PARENT, True)
    assert span.attributes is not None and span.attributes["rpc.grpc.status_code"] == 0 and span.end_time and span.start_time
    assert span.end_time > span.start_time and span.name == "pagecast.v1.GenerationService/Generate"


async def test_a_trace_that_its_beginner_does_not_sample_gets_no_span(traced: tuple[Rig, InMemorySpanExporter]) -> None:
    rig, exporter = traced
    await answer(rig, generate(rig, ("traceparent", f"00-{TRACE}-{PARENT}-00")), 1)
    await answer(rig, generate(rig), 2)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None, "only the call that began a trace of its own"


async def test_cancels_and_refusals_are_whole_under_tracing(traced: tuple[Rig, InMemorySpanExporter]) -> None:
    """A cancelled call ends its request and its span; a refused one keeps its trailers."""
    rig, exporter = traced
    error = await failure(generate(rig, model="other"))
    assert details(error)[1]["ErrorInfo"].reason == "MODEL_UNKNOWN"
    call = generate(rig)
    submit = await rig.scheduler.accept(1)
    call.cancel()
    await rig.scheduler.next(Abort)
    assert rig.scheduler.aborted() == [submit.key]
    async with asyncio.timeout(20):
        while len(exporter.get_finished_spans()) < 2:
            await asyncio.sleep(0.01)
    codes = [span.attributes["rpc.grpc.status_code"] for span in exporter.get_finished_spans() if span.attributes]
    assert codes == [5, 1]


async def test_a_collector_that_is_not_there_costs_no_call(folder: Path) -> None:
    rig = await start_rig(folder, otlp_endpoint="http://127.0.0.1:1")
    await answer(rig, generate(rig), 1)
    await stop_rig(rig)
    assert type(spans_to(None)).__name__ == "Spans"


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_handler_that_raises_cancelled_error_itself_ends_its_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    def cancel(*_: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("pagecast_scheduler.frontend.generation.check_spec", cancel)
    if is_streaming:
        call: Any = rig.generation.GenerateStream(pb.GenerateStreamRequest(spec=pb.GenerationSpec(prompt_text="x")), timeout=30)
        outcome = call.read()
    else:
        outcome = generate(rig)
    async with asyncio.timeout(20):
        error = await failure(outcome)
    assert error.code() is not grpc.StatusCode.OK


async def test_calls_are_counted_by_method_status_and_reason(rig: Rig) -> None:
    await answer(rig, generate(rig), 1)
    await failure(generate(rig, model="other"))
    method = "/pagecast.v1.GenerationService/Generate"
    registry = rig.frontend._guards.metrics.registry

    def count(code: str, reason: str) -> float | None:
        return registry.get_sample_value("pagecast_frontend_calls_total", {"method": method, "code": code, "reason": reason})

    async with asyncio.timeout(20):
        while (count("OK", ""), count("NOT_FOUND", "MODEL_UNKNOWN")) != (1.0, 1.0):
            await asyncio.sleep(0.01)
    assert registry.get_sample_value("pagecast_frontend_open_calls") == 0
    assert registry.get_sample_value("pagecast_frontend_call_seconds_count", {"method": method}) == 2


async def test_no_request_takes_longer_than_the_server_allows(folder: Path) -> None:
    rig = await start_rig(folder, max_request_s=60.0)
    assert 0 < (await answer(rig, generate(rig), 1)).deadline_ms <= 60_000
    spec = pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5]))
    call = rig.generation.Generate(pb.GenerateRequest(spec=spec), timeout=3600)
    assert 0 < (await answer(rig, call, 2)).deadline_ms <= 60_000
    await stop_rig(rig)
