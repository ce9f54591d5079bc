"""Lists of requests over few calls: what a list of prompts goes out on, and its results come back on. Knows no list by itself; see llm.

GenerateMany calls are kept from one list to the next; each is of one list at a time. A thread of gRPC's takes what is to go out, another
one here reads what comes back.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from pagecast.errors import RpcError, Unavailable, from_rpc
from pagecast.v1 import generation_pb2 as pb

MOST_TOGETHER = 32
"""Requests of a message. The server begins with the first one when it has read them all."""
MOST_BYTES = 1 << 20
"""Of requests in a message, but for one that is larger by itself."""
MOST_OPEN = 512
"""Requests of a call that a server begins with before others have ended. Says the public proto."""

HANDED_OVER_S = 0.002
"""How long whoever has more requests waits at most until the thread that sends has taken them. A program that goes on making requests
keeps the interpreter to itself for 5 ms at a time, in which none of those that are made would go out."""

OnResults = Callable[[Sequence[pb.TaggedResult]], None]
OnEnd = Callable[[list[int], RpcError], None]


class ManyCall:
    """One call. on_results: told of results, by a thread of this call's, one message after the other. on_end: told which requests the
    call has left without one, and why, if there are any. A call that rests goes on for whoever has requests next."""

    def __init__(
        self, stub: Any, first: Sequence[pb.TaggedRequest], on_results: OnResults, on_end: OnEnd, most_bytes: int = MOST_BYTES
    ) -> None:  # fmt: skip
        """first: requests to begin with, as a call may end before there is time to send it any. most_bytes: see MOST_BYTES."""
        self._most_bytes = most_bytes
        self._changed = threading.Condition()  # guards what follows
        self._on_results, self._on_end = on_results, on_end
        self._waiting: deque[pb.TaggedRequest] = deque(first)
        self._open: set[int] = {request.tag for request in first}
        self._is_closed = False
        self._call = stub.GenerateMany(self._messages())
        threading.Thread(target=self._read, name="pagecast results", daemon=True).start()
        with self._changed:
            self._hand_over()

    def send(self, requests: Sequence[pb.TaggedRequest]) -> bool:
        """More requests. False, and nothing done, if the call has ended."""
        with self._changed:
            if self._is_closed:
                return False
            self._open.update([request.tag for request in requests])
            self._waiting.extend(requests)
            self._changed.notify_all()
            self._hand_over()
        return True

    def _hand_over(self) -> None:
        self._changed.wait_for(lambda: self._is_closed or not self._waiting, HANDED_OVER_S)

    def rest(self) -> bool:
        """Its requests are over, and whoever asked for them is to be forgotten. False if the call has ended, or some are not over."""
        with self._changed:
            if self._is_closed or self._open:
                return False
            self._on_results, self._on_end = _nobody, _nobody
        return True

    def wake(self, requests: Sequence[pb.TaggedRequest], on_results: OnResults, on_end: OnEnd) -> bool:
        """The call that rested goes on for somebody. False, and nothing done, if it has ended meanwhile."""
        with self._changed:
            if self._is_closed:
                return False
            self._on_results, self._on_end = on_results, on_end
            return self.send(requests)

    def close(self) -> None:
        """No more requests; those under way are cancelled."""
        with self._changed:
            self._is_closed = True
            is_idle = not self._open
            self._open.clear()
            self._changed.notify_all()
        if not is_idle:
            self._call.cancel()

    def _messages(self) -> Iterator[pb.GenerateManyRequest]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                taken = [self._waiting.popleft()]
                size = taken[0].ByteSize()
                while self._waiting and len(taken) < MOST_TOGETHER and (size := size + self._waiting[0].ByteSize()) <= self._most_bytes:
                    taken.append(self._waiting.popleft())
                self._changed.notify_all()
            yield pb.GenerateManyRequest(requests=taken)

    def _read(self) -> None:
        error: RpcError = Unavailable("UNAVAILABLE", "the server has ended the call before all requests had their results")
        try:
            for message in self._call:
                with self._changed:
                    self._open.difference_update([result.tag for result in message.results])
                    on_results = self._on_results
                on_results(message.results)
                del message, on_results  # which a call that rests would keep
        except grpc.RpcError as failure:
            error = from_rpc(failure)
        with self._changed:
            self._is_closed = True
            left, on_end = sorted(self._open), self._on_end
            self._open.clear()
            self._on_results, self._on_end = _nobody, _nobody
            self._changed.notify_all()
        if left:
            on_end(left, error)
        del on_end  # the failure knows this frame, and would keep whoever asked until the collector comes by


def _nobody(*news: Any) -> None:
    """Who is told of what comes in a call that rests."""


class Calls:
    """Calls to some front ends, begun when there are requests for them and kept for those of later: to begin one takes some
    milliseconds."""

    def __init__(self, stubs: Sequence[Any], most_bytes: int = MOST_BYTES) -> None:
        """A stub for each place. most_bytes: see MOST_BYTES."""
        self._stubs, self._most_bytes = stubs, most_bytes
        self._lock = threading.Lock()  # guards what follows
        self._resting: list[list[ManyCall]] = [[] for _ in stubs]
        self._is_closed = False

    @property
    def num_places(self) -> int:
        return len(self._stubs)

    def begin(self, place: int, requests: Sequence[pb.TaggedRequest], on_results: OnResults, on_end: OnEnd) -> ManyCall:
        """A call of this place, for the caller alone until he gives it back, with requests to begin with."""
        while True:
            with self._lock:
                call = self._resting[place].pop() if self._resting[place] else None
            if call is None:
                return ManyCall(self._stubs[place], requests, on_results, on_end, self._most_bytes)
            if call.wake(requests, on_results, on_end):
                return call

    def give_back(self, place: int, call: ManyCall) -> None:
        """The caller needs it no more. Requests that are not over are cancelled."""
        if call.rest():
            with self._lock:
                if not self._is_closed:
                    return self._resting[place].append(call)
        call.close()

    def close(self) -> None:
        """End those that rest, and from here on those that are given back."""
        with self._lock:
            self._is_closed = True
            resting = [call for calls in self._resting for call in calls]
            self._resting = [[] for _ in self._stubs]
        for call in resting:
            call.close()
