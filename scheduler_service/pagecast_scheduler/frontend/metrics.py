"""The front end's own numbers as Prometheus text on a loopback port. Calls are counted where they end; nothing per token."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class FrontendMetrics:
    """Owns a registry, and the port if one is asked for."""

    def __init__(self, port: int | None = None) -> None:
        """Raises OSError if the port is taken."""
        self.registry = CollectorRegistry()
        self._open = Gauge("pagecast_frontend_open_calls", "Calls being answered", registry=self.registry)
        self._calls = Counter("pagecast_frontend_calls", "Ended calls", ["method", "code", "reason"], registry=self.registry)
        self._kinds: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}  # as bounded as the labels are
        self._duration = Histogram(
            "pagecast_frontend_call_seconds", "Duration of calls", ["method"], buckets=_SECONDS, registry=self.registry
        )  # fmt: skip
        self._expiry = Gauge(
            "pagecast_frontend_certificate_expiry_timestamp_seconds", "End of the server certificate's validity, Unix time; 0 without TLS",
            registry=self.registry,
        )
        self._reload_failures = Gauge(
            "pagecast_frontend_reload_failures", "Changed files that could not be taken over", ["what"], registry=self.registry
        )  # fmt: skip
        self._loop_lag = Gauge(
            "pagecast_frontend_loop_lag_seconds", "How late the last timer of the event loop came", registry=self.registry
        )  # fmt: skip
        self._server = None if port is None else start_http_server(port, addr="127.0.0.1", registry=self.registry)

    def call_begins(self) -> None:
        """A call has come in."""
        self._open.inc()

    def call_ends(self, method: str, code: str, reason: str, seconds: float) -> None:
        """A call is over."""
        self._open.dec()
        kind = method, code, reason
        known = self._kinds.get(kind)
        if known is None:  # finding a labelled series again costs more than counting in it
            known = self._kinds[kind] = self._calls.labels(*kind), self._duration.labels(method)
        known[0].inc()
        known[1].observe(seconds)

    def certificate_expires(self, timestamp: float) -> None:
        """Unix time at which the served certificate ends."""
        self._expiry.set(timestamp)

    def reload_failures(self, what: str, count: int) -> None:
        """Times that changed files of one kind could not be taken over."""
        self._reload_failures.labels(what).set(count)

    def loop_lag(self, seconds: float) -> None:
        """How late a timer came."""
        self._loop_lag.set(max(0.0, seconds))

    def close(self) -> None:
        """Stops serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
