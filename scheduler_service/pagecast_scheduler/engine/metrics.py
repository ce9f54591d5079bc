"""The scheduler's numbers as Prometheus text on a loopback port. The loop copies values in; the server's thread only reads copies."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from pagecast_scheduler.engine.frontends import Frontends
from pagecast_scheduler.engine.workers import WorkerGroup
from pagecast_wire.intake import EngineLimits, EngineStatus, FrontendBatch
from pagecast_wire.sampling import FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_TOTALS = {
    "prefix_tokens_asked": "Tokens of sequences looked up in the prefix cache as they entered the batch",
    "prefix_tokens_hit": "Tokens found in the prefix cache",
    "num_preemptions": "Sequences sent back to the queue, for want of blocks above all",
    "num_recoveries": "Worker groups that were lost or restarted",
    "output_tokens": "Tokens sampled for requests",
    "prompt_tokens": "Tokens computed by prefill: without cache hits, with what is computed again",
    "forced_tokens": "Tokens of outputs that a constraint left no choice about, computed without being drawn",
}


class Metrics:
    """Owns the registry and the port. `update` and `observe` are called by the loop alone."""

    def __init__(self, port: int) -> None:
        """Raises OSError if the port is taken."""
        registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pagecast_{name}", text, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"pagecast_{name}_seconds", text, buckets=_SECONDS, registry=registry)

        self._waiting = gauge("num_requests_waiting", "Open sequences outside the running batch, those sent back to the queue included")
        self._running = gauge("num_requests_running", "Sequences in the running batch")
        self._kv_usage = gauge("kv_cache_usage", "Referenced blocks over all blocks, 0 to 1; cached unreferenced ones count as free")
        self._cached = gauge("kv_blocks_cached", "Unreferenced blocks with reusable content")
        self._state = gauge("serving_state", "1 starting, 2 serving, 3 recovering, 4 stalled, 5 draining")
        self._recording = gauge("recording_failed", "1: the file given with --record takes no more, and the recording has ended")
        self._epoch = gauge("epoch", "Number of the worker group's life")
        self._frontends = gauge("frontends_connected", "Front ends with a slot")
        self._cache_config = Info("pagecast_cache_config", "Block size and count", registry=registry)
        self._totals = {name: Counter(f"pagecast_{name.removeprefix('num_')}", text, registry=registry) for name, text in _TOTALS.items()}
        self._dropped = Counter("pagecast_messages_dropped", "Messages that were not ours or not allowed", registry=registry)
        self._resent = Counter("pagecast_plans_resent", "Step plans sent again", registry=registry)
        self._refused = Counter("pagecast_hellos_refused", "Hellos refused, by kind of peer", ["peer"], registry=registry)
        self._rank_messages = Counter("pagecast_rank_messages", "Messages between scheduler and ranks", ["direction"], registry=registry)
        self._rank_bytes = Counter("pagecast_rank_bytes", "Bytes of messages between scheduler and ranks", ["direction"], registry=registry)
        self._finished = Counter("pagecast_sequences_finished", "Ended sequences by finish reason", ["reason"], registry=registry)
        for reason in FinishReason:
            self._finished.labels(reason.name)
        self._queue = histogram("queue_time", "From acceptance to the first step")
        self._first_token = histogram("time_to_first_token", "From acceptance to the first token")
        self._inter_token = histogram("inter_token_latency", "Mean time between tokens, one observation per sequence")
        self._end_to_end = histogram("request_latency", "From acceptance to the end")
        self._device = Counter("pagecast_device_seconds", "Time that steps have taken on the device", registry=registry)
        self._last: dict[str, int] = {}
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    def update(self, status: EngineStatus, group: WorkerGroup, frontends: Frontends, limits: EngineLimits | None, num_dropped: int) -> None:
        """Copy the present numbers in."""
        self._waiting.set(status.num_waiting)
        self._running.set(status.num_running)
        self._kv_usage.set(status.num_blocks_referenced / max(status.num_blocks, 1))
        self._cached.set(status.num_blocks_cached)
        self._state.set(int(status.state))
        self._epoch.set(status.epoch)
        self._frontends.set(frontends.num_connected)
        for name, counter in self._totals.items():
            self._raise(counter, name, getattr(status, name))
        self._raise(self._device, "device_us", status.device_us, 1e-6)
        self._raise(self._dropped, "dropped", num_dropped)
        self._raise(self._resent, "resent", group.num_resent)
        self._raise(self._refused.labels("worker"), "refused_workers", group.num_refused)
        self._raise(self._refused.labels("frontend"), "refused_frontends", frontends.num_refused)
        for direction, messages, size in (
            ("sent", group.router.num_sent, group.router.bytes_sent), ("received", group.router.num_received, group.router.bytes_received),
        ):  # fmt: skip
            self._raise(self._rank_messages.labels(direction), f"rank_messages_{direction}", messages)
            self._raise(self._rank_bytes.labels(direction), f"rank_bytes_{direction}", size)
        if limits is not None:
            self._cache_config.info({"block_size": str(limits.block_size), "num_blocks": str(limits.num_blocks)})

    def recording(self, has_failed: bool) -> None:
        """Whether the recording that was asked for has ended early."""
        self._recording.set(has_failed)

    def _raise(self, counter: Counter, name: str, total: int, scale: float = 1.0) -> None:
        """Bring a counter up to a total that is counted elsewhere, in units of `scale`."""
        counter.inc(max(total - self._last.get(name, 0), 0) * scale)
        self._last[name] = total

    def observe(self, batch: FrontendBatch) -> None:
        """Count the sequences that this batch ends, each under exactly one reason, with their times."""
        for finished in batch.finished:
            usage = finished.usage
            self._finished.labels(finished.reason.name).inc()
            self._queue.observe(usage.queue_us / 1e6)
            self._end_to_end.observe(usage.total_us / 1e6)
            if usage.output_tokens:
                self._first_token.observe(usage.first_token_us / 1e6)
            if usage.output_tokens > 1:
                self._inter_token.observe((usage.total_us - usage.first_token_us) / 1e6 / (usage.output_tokens - 1))

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
