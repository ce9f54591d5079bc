"""ORCA load reports (gRFC A51): how loaded this replica is, as a trailer of each answer and as a stream for balancers.

application_utilization is what balancers weigh by: the larger of the KV pool's use and the waiting requests over the batch's width.
"""

import asyncio
import math
import time
from typing import Any

import grpc
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3 import orca_pb2

from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_wire.intake import EngineStatus

ORCA = orca_pb2.DESCRIPTOR.services_by_name["OpenRcaService"].full_name
TRAILER = "endpoint-load-metrics-bin"
MIN_INTERVAL_S, DEFAULT_INTERVAL_S = 0.1, 1.0
"""How often a stream reports at most, and where the client asks for nothing."""


class Rate:
    """Events per second of late: each counts fully at first and fades over ten seconds."""

    FADE_S = 10.0

    def __init__(self) -> None:
        self._value = 0.0
        self._at = time.monotonic()

    def count(self) -> None:
        """One more."""
        self._value = self.now() + 1 / self.FADE_S

    def now(self) -> float:
        """Events per second."""
        now = time.monotonic()
        self._value *= math.exp((self._at - now) / self.FADE_S)
        self._at = now
        return self._value


def load_report(state: ServiceState) -> OrcaLoadReport:
    """The present load, of the scheduler's last status; empty before there is one."""
    status = state.engine.status
    if status is None:
        return OrcaLoadReport()
    kv = status.num_blocks_referenced / max(status.num_blocks, 1)
    welcome = state.engine.welcome
    width = welcome.limits.max_num_seqs if welcome is not None else 1
    waiting = status.num_waiting / max(width, 1)
    return OrcaLoadReport(
        application_utilization=max(kv, waiting),
        mem_utilization=kv,
        named_metrics={
            "kv_cache_usage": kv, "num_requests_waiting": float(status.num_waiting), "num_requests_running": float(status.num_running),
        },
    )  # fmt: skip


class Trailer:
    """The report of one more answer as trailing metadata. Balancers weigh a replica by answers per second over its utilization."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._answers = Rate()
        self._status: EngineStatus | None = None
        self._report = OrcaLoadReport()  # of that status

    def __call__(self) -> tuple[str, bytes]:
        self._answers.count()
        if self._status is not self._state.engine.status:
            self._status, self._report = self._state.engine.status, load_report(self._state)
        self._report.rps_fractional = self._answers.now()
        return TRAILER, self._report.SerializeToString()


class OrcaServicer:
    """StreamCoreMetrics: a report at once and then as often as the client asks, until it leaves."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    async def StreamCoreMetrics(self, request: Any, context: Any) -> None:
        """Ends when the server does."""
        interval = request.report_interval
        wanted = interval.seconds + interval.nanos / 1e9 if request.HasField("report_interval") else DEFAULT_INTERVAL_S
        interval_s = max(MIN_INTERVAL_S, wanted)
        ending = self._state.ending
        while not ending.is_set():
            await context.write(load_report(self._state))
            try:
                await asyncio.wait_for(ending.wait(), interval_s)
            except TimeoutError:
                pass


def add_orca(boundary: Any, servicer: OrcaServicer) -> None:
    """Registers the service; its package ships no generated registration."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.StreamCoreMetrics, orca_pb2.OrcaLoadReportRequest.FromString, OrcaLoadReport.SerializeToString
    )
    boundary.add_service(ORCA, {"StreamCoreMetrics": handler})
