"""How LLM keeps its requests: no more than a window of them open, answers read as they come, an error told at once, and what a front end
takes with it asked for again."""

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from waiting import until

from pagecast import errors, llm, many, resuming, types
from pagecast.llm import LLM, RequestOutput
from pagecast.sampling import SamplingParams
from pagecast.v1 import generation_pb2 as pb


class Lost(grpc.RpcError):
    """What a call raises whose front end is gone."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Socket closed"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def refused() -> bytes:
    """The status of a request that cannot be served."""
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="the prompt is too long")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG", domain="pagecast"))
    return status.SerializeToString()


class Call:
    """A call of many under way, read by a thread of its own as gRPC does."""

    def __init__(self, stub: "Stub", messages: Iterator[pb.GenerateManyRequest]) -> None:
        self.cancelled = False
        self.sizes: list[int] = []
        self._stub = stub
        self._told: queue.SimpleQueue[pb.GenerateManyResponse | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(messages,), daemon=True).start()

    def _serve(self, messages: Iterator[pb.GenerateManyRequest]) -> None:
        for message in messages:
            self.sizes.append(len(message.requests))
            for request in message.requests:
                self._stub.begin(self, request)
        self._told.put(None)

    def tell(self, *results: pb.TaggedResult) -> None:
        for result in results:
            self._stub.open.discard(result.tag)
        self._told.put(pb.GenerateManyResponse(results=results))

    def lose(self) -> None:
        self._stub.open.clear()
        self._told.put(Lost())

    def cancel(self) -> None:
        self.cancelled = True
        self.lose()

    def __iter__(self) -> Iterator[pb.GenerateManyResponse]:
        while (told := self._told.get()) is not None:
            if isinstance(told, Exception):
                raise told
            yield told


class Stub:
    """Answers requests as `on_request(their call, their tag)` says."""

    def __init__(self, on_request: Callable[[Call, int], None]) -> None:
        self.calls: list[Call] = []
        self.asked: list[int] = []
        self.timeouts: list[float] = []
        self.open: set[int] = set()
        self.most_open = 0
        self._on_request = on_request

    def GenerateMany(self, messages: Iterator[pb.GenerateManyRequest]) -> Call:
        self.calls.append(Call(self, messages))
        return self.calls[-1]

    def begin(self, call: Call, request: pb.TaggedRequest) -> None:
        self.open.add(request.tag)
        self.most_open = max(self.most_open, len(self.open))
        self.asked.append(request.tag)
        self.timeouts.append(request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else 0.0)
        self._on_request(call, request.tag)


def read(result: types.Generation) -> int:
    return int(result.request_id)


def answer(tag: int) -> pb.TaggedResult:
    return pb.TaggedResult(tag=tag, response=pb.GenerateResponse(request_id=str(tag)))


Run = Callable[..., list[object]]
Read = Callable[[types.Generation], int]


@pytest.fixture
def run() -> Run:
    embedded = LLM.__new__(LLM)

    def run(
        stubs: Stub | list[Stub] | many.Calls, asked: int | Sequence[int], timeout: float | None = None, read: Read = read, window: int = 3
    ) -> list[object]:
        """asked: numbers in the order in which they are asked for, or how many."""
        embedded._window = window
        embedded._calls = stubs if isinstance(stubs, many.Calls) else many.Calls(stubs if isinstance(stubs, list) else [stubs])
        numbers = range(asked) if isinstance(asked, int) else asked
        specs = ((number, pb.GenerationSpec()) for number in numbers)
        found = embedded._run(specs, len(numbers), timeout, lambda number, result: read(result))
        return [found[number] for number in range(len(numbers))]

    return run


def test_answers_in_any_order_come_back_in_that_of_the_prompts(run: Run) -> None:
    """The second of three ends first, and the very first one last of all; two of the last in one message."""

    def on_request(call: Call, tag: int) -> None:
        if tag == 9:
            call.tell(answer(9), answer(8))
            call.tell(answer(0))
        elif tag >= 2:
            call.tell(answer(tag - 1))

    stub = Stub(on_request)
    assert run(stub, 10) == list(range(10))
    assert stub.most_open <= 3 and len(stub.calls) == 1 and not stub.calls[0].cancelled


def test_answers_come_from_threads_of_their_own(run: Run) -> None:
    stubs = [Stub(lambda call, tag: threading.Timer(0.001 * (tag % 7), call.tell, (answer(tag),)).start()) for _ in range(2)]
    assert run(stubs, 60) == list(range(60)) and max(stub.most_open for stub in stubs) <= 3
    assert [sorted(stub.asked) for stub in stubs] == [list(range(0, 60, 2)), list(range(1, 60, 2))]


def test_front_ends_take_turns_in_whatever_order_prompts_go_out(run: Run) -> None:
    """Longest first, and every second one is long."""
    order = llm.longest_first([SamplingParams(max_tokens=9 if number % 2 else 2) for number in range(12)])
    stubs = [Stub(lambda call, tag: call.tell(answer(tag))) for _ in range(2)]
    assert order[0] == 1 and run(stubs, order) == list(range(12))
    assert [stub.asked for stub in stubs] == [order[::2], order[1::2]]


@pytest.mark.parametrize(("count", "first"), [(3, 1), (8, 2), (60, 15), (200, 16)])
def test_front_ends_are_given_their_shares_of_a_short_list_and_rounds_of_a_long_one(count: int, first: int, run: Run) -> None:
    stubs = [Stub(lambda call, tag: call.tell(answer(tag))) for _ in range(4)]
    assert run(stubs, count, window=512) == list(range(count))
    assert stubs[0].asked[:first] == list(range(first)) and first in stubs[1].asked[:1]
    assert max(len(stub.asked) for stub in stubs) - min(len(stub.asked) for stub in stubs) <= first


def test_what_cannot_be_read_is_told_and_the_others_are_cancelled(run: Run) -> None:
    """Outputs are made in other threads, where an error would be nobody's."""

    def broken(result: types.Generation) -> int:
        raise ValueError(f"cannot read {result.request_id}")

    stub = Stub(lambda call, tag: call.tell(answer(0)) if tag == 2 else None)
    with pytest.raises(ValueError, match="cannot read 0"):
        run(stub, 9, read=broken)
    assert stub.calls[0].cancelled


def test_what_a_front_end_takes_with_it_is_asked_for_again(run: Run) -> None:
    """Three are lost at once, one with its answer told before; on another front end if there is one."""

    def on_request(call: Call, tag: int) -> None:
        if len(first.calls) == 1 and tag == 4:
            call.tell(answer(0))
            call.lose()
        elif len(first.calls) > 1 or tag not in (0, 2):
            call.tell(answer(tag))

    first, second = Stub(on_request), Stub(lambda call, tag: call.tell(answer(tag)))
    assert run([first, second], 8) == list(range(8))
    assert sorted(first.asked + second.asked) == sorted([*range(8), 2, 4]) and {2, 4} <= set(second.asked)


def test_what_nobody_asked_for_is_passed_over(run: Run) -> None:
    """A server's mistakes: a tag of nobody's, a failed one too, an answer told twice."""
    wrong = pb.TaggedResult(tag=2**63, status=refused())
    stub = Stub(lambda call, tag: call.tell(answer(77), wrong, answer(tag), answer(tag)))
    assert run(stub, 3) == [0, 1, 2]


def test_what_was_asked_goes_with_its_end(run: Run) -> None:
    """Nothing of prompts and outputs waits for the collector."""
    gc.collect()
    gc.disable()
    try:
        assert run([Stub(lambda call, tag: call.tell(answer(tag))) for _ in range(2)], 10) == list(range(10))
        with pytest.raises(errors.DeadlineExceeded):
            run(Stub(lambda call, tag: None), 3, 0.05)  # its call is cancelled, which is a failure for whoever reads it
        end = time.monotonic() + 30
        while (left := [each for each in gc.get_objects() if isinstance(each, llm._Requests)]) and time.monotonic() < end:
            del left
            time.sleep(0.01)
        assert not left
    finally:
        gc.enable()


def test_a_call_that_ends_too_early_is_a_loss_too(run: Run) -> None:
    """A server that ends it well, with requests open."""

    def on_request(call: Call, tag: int) -> None:
        if len(stub.calls) == 1:
            call._told.put(None)
        else:
            call.tell(answer(tag))

    stub = Stub(on_request)
    assert run(stub, 2) == [0, 1] and len(stub.calls) >= 2


def test_a_call_that_nobody_ever_takes_fails_with_what_was_said(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(resuming, "GIVE_UP_AFTER_S", 0.5)
    stub = Stub(lambda call, tag: call.lose())
    with pytest.raises(errors.Unavailable):
        run(stub, 1)
    assert 1 < len(stub.calls) < 10


def test_an_error_is_told_while_earlier_requests_go_on(run: Run) -> None:
    stub = Stub(lambda call, tag: call.tell(pb.TaggedResult(tag=1, status=refused())) if tag == 1 else None)
    with pytest.raises(errors.InvalidRequest, match="too long") as caught:
        run(stub, 3)
    assert caught.value.reason == "PROMPT_TOO_LONG" and stub.calls[0].cancelled


def test_a_request_that_nobody_answers_ends_with_its_timeout(run: Run, monkeypatch: Any) -> None:
    """The server is told of it, and says so by itself if it can; one that hangs cannot."""
    monkeypatch.setattr(llm, "_LATE_S", 0.1)
    stub, begun = Stub(lambda call, tag: None), time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        run(stub, 3, 0.3)
    assert 0.4 <= time.monotonic() - begun < 30 and all(0.2 < timeout <= 0.3 for timeout in stub.timeouts) and stub.calls[0].cancelled


def test_a_window_has_as_many_calls_as_let_all_of_it_be_open() -> None:
    assert llm.for_window(["a"], 512) == ["a"] and llm.for_window(["a"], 513) == ["a", "a"]
    assert llm.for_window(["a", "b"], 1024) == ["a", "b"] and llm.for_window(["a", "b"], 2048) == ["a", "b", "a", "b"]


@pytest.mark.parametrize(("processors", "count"), [(1, 1), (7, 1), (8, 2), (15, 2), (16, 4), (128, 4)])
def test_front_ends_go_by_the_processors_there_are(processors: int, count: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    assert llm.front_ends() == count


def test_requests_that_wait_together_go_out_together_in_bounded_messages(monkeypatch: Any) -> None:
    monkeypatch.setattr(many, "MOST_TOGETHER", 4)
    began, go = threading.Event(), threading.Event()

    def on_request(call: Call, tag: int) -> None:
        began.set()
        assert go.wait(60)

    stub, results = Stub(on_request), queue.SimpleQueue[int]()
    sizes = [1] * 6 + [100, 2000, 100, 100]
    first, *others = (
        pb.TaggedRequest(tag=tag, spec=pb.GenerationSpec(prompt_token_ids=pb.TokenIds(ids=[5] * size))) for tag, size in enumerate(sizes)
    )
    call = many.ManyCall(stub, [first], lambda told: [results.put(each.tag) for each in told], lambda left, error: None, 1000)
    assert began.wait(60) and call.send(others[:4]) and call.send(others[4:])
    go.set()
    while len(stub.asked) < len(sizes):
        time.sleep(0.01)
    assert stub.asked == list(range(10)) and stub.calls[0].sizes == [1, 4, 2, 1, 2]
    call.close()
    assert stub.calls[0].cancelled and not call.send([pb.TaggedRequest(tag=11)])


def test_calls_go_on_for_those_who_come_next(run: Run) -> None:
    """Until one ends, which the next ones learn before they are sent, and but for one whose requests were given up."""

    def on_request(call: Call, tag: int) -> None:
        if tag < 8:
            call.tell(answer(tag))

    stubs = [Stub(on_request) for _ in range(2)]
    kept = many.Calls(stubs)
    for _ in range(3):
        assert run(kept, 6) == list(range(6))
    assert [len(stub.calls) for stub in stubs] == [1, 1] and [len(stub.asked) for stub in stubs] == [9, 9]
    stubs[0].calls[0].lose()
    until(lambda: kept._resting[0][0]._is_closed, "the lost call ends", 60)
    assert run(kept, 6) == list(range(6)) and [len(stub.calls) for stub in stubs] == [2, 1]
    with pytest.raises(errors.DeadlineExceeded):
        run(kept, 9, 0.05)  # the first front end keeps one to itself
    assert [stub.calls[-1].cancelled for stub in stubs] == [True, False]
    assert run(kept, 6) == list(range(6)) and [len(stub.calls) for stub in stubs] == [3, 1]
    kept.close()
    assert run(kept, 2) == [0, 1] and [len(stub.calls) for stub in stubs] == [4, 2] and not any(kept._resting)


def test_those_who_ask_at_once_have_calls_of_their_own() -> None:
    stub, told = Stub(lambda call, tag: None), queue.SimpleQueue[tuple[str, int]]()
    kept = many.Calls([stub])

    def begun(name: str, tag: int) -> many.ManyCall:
        request = pb.TaggedRequest(tag=tag)
        return kept.begin(0, [request], lambda results: told.put((name, results[0].tag)), lambda left, error: None)

    first, second = begun("first", 1), begun("second", 1)
    until(lambda: len(stub.asked) == 2, "both are asked", 60)
    stub.calls[1].tell(answer(1))
    assert told.get(timeout=60) == ("second", 1)
    kept.give_back(0, second)
    stub.calls[0].tell(answer(1))
    assert told.get(timeout=60) == ("first", 1)
    kept.give_back(0, first)
    third = begun("third", 2)
    assert third in (first, second) and len(stub.calls) == 2
    kept.give_back(0, third)
    assert third._is_closed  # its request was not over
    kept.close()
    assert first._is_closed and second._is_closed


class Asked(LLM):
    """Answers every spec with its prompt, and keeps them in the order of asking."""

    def __init__(self) -> None:
        self.specs: list[pb.GenerationSpec] = []

    def _run(
        self, specs: Iterator[tuple[int, pb.GenerationSpec]], count: int, timeout: float | None, output_of: Callable[[int, Any], Any]
    ) -> dict[int, Any]:
        taken = list(specs)
        self.specs = [spec for _, spec in taken]
        return {number: output_of(number, spec.prompt_text) for number, spec in taken}

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(RequestOutput, "of", lambda prompt, answer: (prompt, answer))
    return Asked()


PROMPTS = ["a", "b", "c", "d", "e"]
LENGTHS = [SamplingParams(max_tokens=count) for count in (5, 9, 7, 9)]


def test_many_are_a_batch_asked_longest_first(asked: Asked) -> None:
    """Of one without a limit nothing is known but that it may be the longest. Results are in the order of the prompts."""
    results: Any = asked.generate(PROMPTS, [*LENGTHS, SamplingParams(max_tokens=None)])
    assert [spec.prompt_text for spec in asked.specs] == ["e", "b", "d", "c", "a"]
    assert {spec.scheduling.priority for spec in asked.specs} == {pb.PRIORITY_BATCH}
    assert results == [(prompt, prompt) for prompt in PROMPTS]


def test_a_class_that_is_named_stays_and_goes_by_the_order_given(asked: Asked) -> None:
    asked.generate(PROMPTS[:4], LENGTHS, priority="normal")
    assert [spec.prompt_text for spec in asked.specs] == PROMPTS[:4]
    assert {spec.scheduling.priority for spec in asked.specs} == {pb.PRIORITY_NORMAL}


def test_one_prompt_is_no_batch(asked: Asked) -> None:
    asked.generate("a")
    assert asked.specs[0].scheduling.priority == pb.PRIORITY_UNSPECIFIED
