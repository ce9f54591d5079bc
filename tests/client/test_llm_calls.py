"""How LLM keeps its calls: no more than a window of them open, answers read as they come, and an error told at once."""

from collections.abc import Callable

import grpc
import pytest

from pagecast import answers, errors
from pagecast.llm import LLM
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
        return list(llm._run((generation_pb2.GenerationSpec() for _ in range(count)), None))

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


def test_an_error_is_told_while_earlier_calls_go_on(run: Callable[[Stub, int], list[object]]) -> None:
    stub = Stub(lambda calls: calls[1].end(Refused()) if len(calls) == 2 else None)
    with pytest.raises(errors.InvalidRequest, match="too long"):
        run(stub, 3)
    assert stub.calls[0].outcome is None and all(call.cancelled for call in stub.calls)
