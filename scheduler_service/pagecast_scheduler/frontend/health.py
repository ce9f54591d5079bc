"""grpc.health.v1 (Check, Watch, List), true to the engine: SERVING only while the scheduler is heard and says so.

A Watch never ends by itself (clients take any end for a failure), also for a service nobody knows; `end_watches` ends them in
the last step of a shutdown. "liveness" is about this process alone; every other name follows the engine.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_wire.intake import ServingState

_Status = health_pb2.HealthCheckResponse.ServingStatus
LIVENESS, READINESS = "liveness", "readiness"


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Statuses by service name, and the Watches that wait for them to change."""

    def __init__(self, services: Iterable[str]) -> None:
        self._status: dict[str, int] = dict.fromkeys(["", READINESS, *services], _Status.NOT_SERVING)
        self._status[LIVENESS] = _Status.SERVING
        self._changed: asyncio.Future[None] | None = None
        self._is_ending = False

    def update(self, state: ServingState) -> None:
        """Takes over the engine's state."""
        status = _Status.SERVING if state is ServingState.SERVING else _Status.NOT_SERVING
        if self._status[READINESS] != status:
            self._status.update({name: status for name in self._status if name != LIVENESS})
            self._announce()

    def end_watches(self) -> None:
        """Ends every Watch with OK."""
        self._is_ending = True
        self._announce()

    def _announce(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        """Status now; NOT_FOUND for an unknown name."""
        status = self._status.get(request.service)
        if status is None:
            raise Refusal(Reason.SERVICE_UNKNOWN)
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:
        """Every name with its status."""
        return health_pb2.HealthListResponse(statuses={n: health_pb2.HealthCheckResponse(status=s) for n, s in self._status.items()})

    async def Watch(self, request: Any, context: Any) -> None:
        """Status now and at every change."""
        last = None
        while not self._is_ending:
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            changed = self._changed
            status = self._status.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != last:
                last = status
                await context.write(health_pb2.HealthCheckResponse(status=status))
            await asyncio.wait((changed,))
