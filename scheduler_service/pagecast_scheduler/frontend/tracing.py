"""Spans of calls for OpenTelemetry, made at the end of each call from what is known then; without an endpoint, nothing.

The W3C context of the caller is the parent, and our span id is the one that stands in the log line. Export runs on a thread of the SDK
with a bounded queue: a collector that is slow or gone costs spans, never calls.
"""

import time
from typing import Any

import grpc

from pagecast_scheduler.frontend.call_context import Call

_CODES = {code.name: code.value[0] for code in grpc.StatusCode}


class Spans:
    """No spans."""

    def record(self, method: str, call: Call, code: str, seconds: float) -> None:
        """A call is over."""

    def close(self) -> None:
        """Sends what is left."""


class OtlpSpans(Spans):
    """One server span per call, through a span processor of the OpenTelemetry SDK."""

    def __init__(self, processor: Any, resource: Any) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        self._span, self._context, self._kind = ReadableSpan, SpanContext, SpanKind.SERVER
        self._flags, self._state, self._status, self._codes = TraceFlags, TraceState, Status, StatusCode
        self._scope = InstrumentationScope("pagecast.frontend")
        self._processor, self._resource = processor, resource

    def record(self, method: str, call: Call, code: str, seconds: float) -> None:
        """Hands the span to the processor, unless its trace is not sampled. Names and numbers only: no prompt, no output, no header."""
        trace = call.trace
        if not trace.is_sampled:
            return
        flags = self._flags(1)
        state = self._state.from_header([trace.state]) if trace.state else None
        context = self._context(int(trace.trace_id, 16), int(trace.span_id, 16), False, flags, state)
        parent = self._context(int(trace.trace_id, 16), int(trace.parent_id, 16), True, flags, state) if trace.parent_id else None
        end = time.time_ns()  # noqa: TID251 - a stamp for people; nothing is decided by it
        service, _, name = method.strip("/").partition("/")
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "rpc.grpc.status_code": _CODES[code],
        }  # fmt: skip
        named = {"pagecast.reason": call.reason, "pagecast.request_id": call.request_id, "pagecast.tenant": call.principal.tenant}
        attributes.update({key: text for key, text in named.items() if text})
        attributes.update({f"pagecast.label.{key}": text for key, text in call.labels})
        is_ours_to_fix = code in ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED")
        self._processor.on_end(
            self._span(
                name=method.strip("/"), context=context, parent=parent, resource=self._resource, attributes=attributes, kind=self._kind,
                start_time=end - int(seconds * 1e9), end_time=end, instrumentation_scope=self._scope,
                status=self._status(self._codes.ERROR if is_ours_to_fix else self._codes.UNSET),
            )
        )  # fmt: skip

    def close(self) -> None:
        """Sends what is left, within five seconds."""
        self._processor.force_flush(5000)
        self._processor.shutdown()


def spans_to(endpoint: str | None) -> Spans:
    """Spans for an OTLP/gRPC endpoint (URL), or none. Raises ModuleNotFoundError without the `otel` extra."""
    if endpoint is None:
        return Spans()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=5)
    return OtlpSpans(BatchSpanProcessor(exporter), Resource.create({"service.name": "pagecast-frontend"}))
