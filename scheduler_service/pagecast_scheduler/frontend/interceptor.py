"""What stands before every method of a listener: metadata rules, authentication, roles, the limit of streams per connection, and one
metric, one span and one log line per call. Nothing here runs per message.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog

from pagecast_scheduler.frontend import call_context
from pagecast_scheduler.frontend.authorizer import Authorizer
from pagecast_scheduler.frontend.boundary import end_with
from pagecast_scheduler.frontend.call_context import Call
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.metrics import FrontendMetrics
from pagecast_scheduler.frontend.principals import ANONYMOUS, Principal
from pagecast_scheduler.frontend.tracing import Spans

log = structlog.get_logger("pagecast.frontend")

_ANSWERS = "/pagecast.v1.GenerationService/"
"""Methods whose answers carry a load report."""
_QUIET = ("/grpc.", "/pagecast.v1.RuntimeService/", "/xds.")
"""Methods that are called all the time by machines; their good ends are logged at debug level."""


_HEALTH = "/grpc.health.v1.Health/"


class ConnectionLimit:
    """Counts open calls by connection. A Unix socket's callers cannot be told apart and are not limited."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    def enter(self, peer: str) -> bool:
        """Counts one more call; False, and nothing counted, if the connection has its share already."""
        if not peer.startswith("unix:") and self._open[peer] >= self._limit:
            return False
        self._open[peer] += 1
        return True

    def leave(self, peer: str) -> None:
        """The call is over."""
        self._open[peer] -= 1
        if self._open[peer] <= 0:
            del self._open[peer]


class CallInterceptor:
    """See the module. Put around each handler once, when it is registered: an interceptor of gRPC's own would be asked for every call.

    `principal`: who every caller of this listener is, whatever it says; None asks the authorizer."""

    def __init__(
        self, authorizer: Authorizer, metrics: FrontendMetrics, spans: Spans, max_streams_per_connection: int,
        principal: Principal | None = None, load_trailer: Callable[[], tuple[str, bytes]] | None = None,
    ) -> None:
        self._authorizer = authorizer
        self._metrics = metrics
        self._spans = spans
        self._principal = principal
        self._load_trailer = load_trailer
        self._connections = ConnectionLimit(max_streams_per_connection)

    def around(self, method: str, behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """The behaviour of a method, "/package.Service/Method", with everything above around it."""
        reports_load = self._load_trailer if method.startswith(_ANSWERS) else None

        async def call(request: Any, context: Any) -> Any:
            started = time.monotonic()
            self._metrics.call_begins()
            known, peer, is_counted = Call(), context.peer(), False
            code = "CANCELLED"
            try:
                refusal = None
                try:
                    known = self._admit(method, context)
                    is_counted = self._connections.enter(peer)
                    if not is_counted:
                        raise Refusal(Reason.OVERLOADED, message="the connection has as many open calls as are allowed")
                except Refusal as refused:
                    refusal = refused
                call_context.enter(known)
                if refusal is not None:
                    await end_with(context, refusal)
                answer = await behaviour(request, context)
                code = "OK"
                if reports_load is not None:
                    context.set_trailing_metadata((*(context.trailing_metadata() or ()), reports_load()))
                return answer
            except grpc.aio.AbortError as aborted:
                code = _code_name(context)
                # gRPC keeps it in a cycle with the context: frames that have the request would hold that until the collector comes by.
                request = None
                raise aborted.with_traceback(None) from None
            except asyncio.CancelledError:
                raise
            finally:
                if is_counted:
                    self._connections.leave(peer)
                # Behind the answers of all calls that end in this turn of the loop: of a whole batch none is to wait for the notes.
                asyncio.get_running_loop().call_soon(self._note, method, known, code, time.monotonic() - started)

        return call

    def _admit(self, method: str, context: Any) -> Call:
        """Who calls, and what its metadata says. Raises Refusal."""
        call = call_context.read_metadata(context.invocation_metadata() or ())
        if self._principal is not None:
            call.principal = self._principal
        elif method.startswith(_HEALTH) and context.peer().startswith("unix:"):
            call.principal = ANONYMOUS  # whoever opens such a socket is this user: the gateway, which has no token of its own
        else:
            sans = sans_of(context) if self._authorizer.has_client_ca else ()
            call.principal = self._authorizer.identify(call.authorization, sans)
        call.authorization = None
        self._authorizer.allow(call.principal, method)
        return call

    def _note(self, method: str, call: Call, code: str, elapsed: float) -> None:
        self._metrics.call_ends(method, code, call.reason, elapsed)
        self._spans.record(method, call, code, elapsed)
        say = log.debug if code == "OK" and method.startswith(_QUIET) else log.info
        say(
            "call", method=method, code=code, reason=call.reason or None, principal=call.principal.name or None,
            request_id=call.request_id or None, trace_id=call.trace.trace_id, span_id=call.trace.span_id,
            elapsed_ms=round(1000 * elapsed, 1), labels=dict(call.labels) or None,
        )  # fmt: skip


def sans_of(context: Any) -> tuple[str, ...]:
    """Subject alternative names of the caller's certificate, as TLS has checked it."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)


def _code_name(context: Any) -> str:
    """Name of the status that an aborted call ended with."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")
