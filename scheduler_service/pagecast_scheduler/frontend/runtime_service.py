"""RuntimeService: what the instance is, how loaded it is, and what its prefix cache holds."""

import asyncio
from importlib.metadata import version
from typing import Any

from pagecast.v1 import runtime_pb2 as pb
from pagecast.v1 import runtime_pb2_grpc
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.findings import Findings
from pagecast_scheduler.frontend.service_state import ServiceState
from pagecast_wire import view_u32
from pagecast_wire.control import CacheEvents

MIN_LOAD_S, MAX_LOAD_S, DEFAULT_LOAD_S = 0.1, 60.0, 1.0


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    """Identity, load, and the prefix cache's changes."""

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
        return self._load()

    async def WatchLoad(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """The load whenever it has changed, at most once per interval. Ends with the server."""
        found = Findings()
        interval = found.seconds("min_interval", request, MIN_LOAD_S, MAX_LOAD_S, DEFAULT_LOAD_S)
        found.refuse()
        last = None
        while True:
            load = self._load()
            if load != last:
                last = load
                await context.write(pb.WatchLoadResponse(load=load))
            try:
                async with asyncio.timeout(interval):
                    await self._state.ending.wait()
                return
            except TimeoutError:
                continue

    async def WatchCacheEvents(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """What is cached, then what changes. Ends with the server."""
        cursor = request.resume_after
        resumes = request.HasField("resume_after")
        watch = self._state.engine.watch_cache(cursor.instance_id if resumes else "", cursor.sequence if resumes else -1)
        ending = asyncio.ensure_future(self._state.ending.wait())
        try:
            while True:
                following = asyncio.ensure_future(watch.next())
                await asyncio.wait((following, ending), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    return
                instance, events = following.result()
                await context.write(self._cache_events(instance, events, request.include_token_ids))
        finally:
            ending.cancel()
            self._state.engine.end_watch(watch)

    def _cache_events(self, instance: str, events: CacheEvents, with_tokens: bool) -> pb.WatchCacheEventsResponse:
        welcome = self._state.engine.welcome
        message = pb.WatchCacheEventsResponse(
            instance_id=instance, epoch=events.epoch, sequence=events.sequence, snapshot=events.is_snapshot,
            snapshot_continues=events.more, cleared=events.cleared, removed_hashes=events.removed,
            block_size=welcome.limits.block_size if welcome is not None else 0,
        )  # fmt: skip
        for block in events.stored:
            ids = view_u32(block.tokens).tolist() if with_tokens else ()
            message.stored.add(hash=block.digest, parent_hash=block.parent, token_ids=ids)
        return message

    def _load(self) -> pb.GetLoadResponse:
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
            device_us=status.device_us,
        )
