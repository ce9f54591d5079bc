"""How LLM keeps its calls: no more than a window of them open, answers read as they come, and an error told at once."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from pagecast import answers, errors, resuming
from pagecast.llm import LLM, RequestOutput
from pagecast.sampling import SamplingParams
from pagecast.v1 import generation_pb2


class Refused(grpc.RpcError):
    """What a call that fails raises."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "prompt is too long"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class Call:
    """A call under way. Whoever asks for its result before it has ended fails."""

    def __init__(self) -> None:
        self.outcome: object = None
        self.cancelled = False
        self._callbacks: list[Callable[[object], None]] = []

    def end(self, outcome: object) -> None:
        self.outcome = outcome
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)
        if self.outcome is not None:
            callback(self)

    def result(self) -> object:
        assert self.outcome is not None, "waited for a call that has not ended"
        if isinstance(self.outcome, grpc.RpcError):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Stub:
    """Answers calls as `on_call(calls so far)` says."""

    def __init__(self, on_call: Callable[[list[Call]], None]) -> None:
        self.calls: list[Call] = []
        self.most_open = 0
        self._on_call = on_call
        self.Generate = self

    def future(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> Call:
        self.calls.append(Call())
        self.most_open = max(self.most_open, sum(call.outcome is None for call in self.calls))
        self._on_call(self.calls)
        return self.calls[-1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stub, int], list[object]]:
    monkeypatch.setattr(answers, "generation", lambda answer: answer)
    llm = LLM.__new__(LLM)
    llm._window = 3

    def run(stub: Stub, count: int) -> list[object]:
        llm._stubs = [stub]
        found = llm._run(((number, generation_pb2.GenerationSpec()) for number in range(count)), None, lambda number, answer: answer)
        return [found[number] for number in range(count)]

    return run


def test_answers_in_any_order_come_back_in_that_of_the_prompts(run: Callable[[Stub, int], list[object]]) -> None:
    """The second call of three ends first, and the very first one last of all."""

    def on_call(calls: list[Call]) -> None:
        if len(calls) == 10:
            for number in (9, 8, 0):
                calls[number].end(number)
        elif len(calls) >= 3:
            calls[len(calls) - 2].end(len(calls) - 2)

    stub = Stub(on_call)
    assert run(stub, 10) == list(range(10))
    assert stub.most_open == 3


def test_answers_come_from_threads_of_their_own(run: Callable[[Stub, int], list[object]]) -> None:
    def on_call(calls: list[Call]) -> None:
        number = len(calls) - 1
        threading.Timer(0.001 * (number % 7), calls[number].end, (number,)).start()

    stub = Stub(on_call)
    assert run(stub, 60) == list(range(60)) and stub.most_open <= 3


def test_what_cannot_be_read_is_told_and_the_others_are_cancelled(run: Callable[[Stub, int], list[object]], monkeypatch: Any) -> None:
    """Outputs are made in gRPC's threads, where an error would be nobody's."""

    def broken(answer: object) -> object:
        raise ValueError(f"cannot read {answer}")

    monkeypatch.setattr(answers, "generation", broken)
    stub = Stub(lambda calls: calls[0].end(0) if len(calls) == 3 else None)
    with pytest.raises(ValueError, match="cannot read 0"):
        run(stub, 9)
    assert all(call.cancelled for call in stub.calls[1:])


class Lost(Refused):
    """What a call raises whose front end is gone."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def test_what_a_front_end_takes_with_it_is_asked_for_again(run: Callable[[Stub, int], list[object]]) -> None:
    """The first three calls are lost at once; all that come after them are answered."""
    last: list[int] = []

    def on_call(calls: list[Call]) -> None:
        number = len(calls) - 1
        if number == 2:
            for call in calls:
                call.end(Lost())
        elif number > 2:
            calls[number].end(number)
            last.append(number)

    stub = Stub(on_call)
    assert run(stub, 4) == [3, 4, 5, 6] and last == [3, 4, 5, 6] and stub.most_open == 3


def test_a_call_that_nobody_ever_takes_fails_with_what_was_said(run: Callable[[Stub, int], list[object]], monkeypatch: Any) -> None:
    monkeypatch.setattr(resuming, "GIVE_UP_AFTER_S", 0.5)
    stub = Stub(lambda calls: calls[-1].end(Lost()))
    with pytest.raises(errors.Unavailable):
        run(stub, 1)
    assert 1 < len(stub.calls) < 10


def test_an_error_is_told_while_earlier_calls_go_on(run: Callable[[Stub, int], list[object]]) -> None:
    stub = Stub(lambda calls: calls[1].end(Refused()) if len(calls) == 2 else None)
    with pytest.raises(errors.InvalidRequest, match="too long"):
        run(stub, 3)
    assert stub.calls[0].outcome is None and all(call.cancelled for call in stub.calls)


class Asked(LLM):
    """Answers every spec with its prompt, and keeps them in the order of asking."""

    def __init__(self) -> None:
        self.specs: list[generation_pb2.GenerationSpec] = []

    def _run(
        self, specs: Iterator[tuple[int, generation_pb2.GenerationSpec]], timeout: float | None, output_of: Callable[[int, Any], Any]
    ) -> dict[int, Any]:
        taken = list(specs)
        self.specs = [spec for _, spec in taken]
        return {number: output_of(number, spec.prompt_text) for number, spec in taken}

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(RequestOutput, "of", lambda prompt, answer: (prompt, answer))
    return Asked()


PROMPTS = ["a", "b", "c", "d", "e"]
LENGTHS = [SamplingParams(max_tokens=count) for count in (5, 9, 7, 9)]


def test_many_are_a_batch_asked_longest_first(llm: Asked) -> None:
    """Of one without a limit nothing is known but that it may be the longest. Results are in the order of the prompts."""
    results: Any = llm.generate(PROMPTS, [*LENGTHS, SamplingParams(max_tokens=None)])
    assert [spec.prompt_text for spec in llm.specs] == ["e", "b", "d", "c", "a"]
    assert {spec.scheduling.priority for spec in llm.specs} == {generation_pb2.PRIORITY_BATCH}
    assert results == [(prompt, prompt) for prompt in PROMPTS]


def test_a_class_that_is_named_stays_and_goes_by_the_order_given(llm: Asked) -> None:
    llm.generate(PROMPTS[:4], LENGTHS, priority="normal")
    assert [spec.prompt_text for spec in llm.specs] == PROMPTS[:4]
    assert {spec.scheduling.priority for spec in llm.specs} == {generation_pb2.PRIORITY_NORMAL}


def test_one_prompt_is_no_batch(llm: Asked) -> None:
    llm.generate("a")
    assert llm.specs[0].scheduling.priority == generation_pb2.PRIORITY_UNSPECIFIED
