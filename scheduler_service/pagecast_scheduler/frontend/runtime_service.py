"""RuntimeService: what the instance is and how loaded it is, from the scheduler's status alone."""

from importlib.metadata import version
from typing import Any

from pagecast.v1 import runtime_pb2 as pb
from pagecast.v1 import runtime_pb2_grpc
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.service_state import ServiceState


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    """GetServerInfo and GetLoad."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._version = version("pagecast")

    def _instance(self) -> tuple[str, int]:
        """The scheduler's incarnation and epoch; empty while unknown."""
        engine = self._state.engine
        instance = engine.welcome.scheduler_incarnation if engine.welcome is not None else ""
        return instance, engine.status.epoch if engine.status is not None else 0

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        """Version and identity."""
        instance, epoch = self._instance()
        return pb.GetServerInfoResponse(version=self._version, instance_id=instance, epoch=epoch)

    async def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        """Counters of the last status; at most a second old while the scheduler lives."""
        status = self._state.engine.status
        if status is None:
            raise Refusal(Reason.STARTING)
        return pb.GetLoadResponse(
            instance_id=self._instance()[0],
            epoch=status.epoch,
            state=int(self._state.serving_state),  # type: ignore[arg-type]
            step=status.step,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            num_blocks=status.num_blocks,
            num_blocks_referenced=status.num_blocks_referenced,
            num_blocks_cached=status.num_blocks_cached,
            kv_utilization=status.num_blocks_referenced / max(status.num_blocks, 1),
            prefix_tokens_asked=status.prefix_tokens_asked,
            prefix_tokens_hit=status.prefix_tokens_hit,
            num_preemptions=status.num_preemptions,
            num_recoveries=status.num_recoveries,
            prompt_tokens=status.prompt_tokens,
            output_tokens=status.output_tokens,
        )
