"""Why no server has answered. gRPC says of a timeout only that it ran out; a client that has never had an answer asks once more, in a way
that is not tried again and so comes back with what is in the way: nobody listens, a name that is none, a handshake that fails."""

from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import UInt32Value

from pagecast import channel
from pagecast.errors import NO_CONNECTION, DeadlineExceeded, RpcError, from_rpc

ASK_S = 0.25
"""How much later than its timeout a call may end over this."""
NOT_SERVING = 2


class _OfAClient:
    """has_answered: whether the client's server ever has."""

    def __init__(self, grpc_channel: Any, target: str, metadata: Any) -> None:
        self._watch = channel.health_watch_method(grpc_channel)
        self._target = target
        self._metadata = metadata
        self.has_answered = False


class Reach(_OfAClient):
    """Of one synchronous client."""

    def explained(self, error: RpcError) -> RpcError:
        """The same error, or one that says also why nothing answered."""
        if self.has_answered or not _is_silence(error):
            return error
        call = self._watch(channel.health_request(""), timeout=ASK_S, metadata=self._metadata)
        try:
            why = _said(next(iter(call)), self._target)
        except grpc.RpcError as found:
            why = _reason(from_rpc(found), self._target)
        finally:
            call.cancel()
        return _because(error, why)


class AsyncReach(_OfAClient):
    """The same for an event loop."""

    async def explained(self, error: RpcError) -> RpcError:
        """The same error, or one that says also why nothing answered."""
        if self.has_answered or not _is_silence(error):
            return error
        call = self._watch(channel.health_request(""), timeout=ASK_S, metadata=self._metadata)
        try:
            why = _said(await anext(aiter(call)), self._target)
        except grpc.RpcError as found:
            why = _reason(from_rpc(found), self._target)
        finally:
            call.cancel()
        return _because(error, why)


def _is_silence(error: RpcError) -> bool:
    """Whether a timeout ran out, and not by the server's word."""
    return isinstance(error, DeadlineExceeded) and not error.reason


def _said(message: UInt32Value, target: str) -> str:
    return f"{target} answers, and is not serving yet" if message.value == NOT_SERVING else ""


def _reason(found: RpcError, target: str) -> str:
    if found.code == "UNAVAILABLE" and not found.reason:
        why = found.message.removeprefix(NO_CONNECTION)
        return f"{NO_CONNECTION}{why}" if why.startswith(f"{target}: ") else f"{NO_CONNECTION}{target}: {why}"
    return f"nothing answers at {target}" if _is_silence(found) else ""


def _because(error: RpcError, why: str) -> RpcError:
    return DeadlineExceeded(error.code, f"{error.message}: {why}") if why else error
