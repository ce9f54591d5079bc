"""An output that two readers share: wherever the first is left, both together have it once."""

from array import array

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.answer_parser import AnswerParser, AnswerPlan, ParsedText
from pagecast_scheduler.frontend.call_forms import CALL_FORMATS
from pagecast_scheduler.frontend.detokenizer import Detokenizer
from pagecast_scheduler.frontend.output_parts import REASONING_FORMATS
from pagecast_scheduler.frontend.output_sequence import OutputSequence
from pagecast_scheduler.frontend.tokenizer import ByteTokenizer
from pagecast_wire.intake import Finished, Usage
from pagecast_wire.sampling import FinishReason

TOKENIZER = ByteTokenizer(512)
FORMS = {form.name: form for form in CALL_FORMATS}
END = Finished(1, 0, FinishReason.LENGTH, Usage(1, 0, 1, 0, 0, 0, 0, 0, 0))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "\u00e9\u20ac"}}\n</tool_call>'
WRITTEN = st.lists(
    st.sampled_from([
        "<think>", "</think>", "</thi", " \n", "so", "\u00e9\u20ac", "\ufffd", "[TOOL_CALLS]add", "[ARGS]", '{"a": 1}', CALL, CALL[:35],
    ]), max_size=7,
).map("".join)  # fmt: skip


def made(form: str, stops: list[str]) -> OutputSequence:
    plan = AnswerPlan(FORMS[form], REASONING_FORMATS[0], tools=frozenset({"add"}))
    return OutputSequence(0, Detokenizer(TOKENIZER, stops), bool(stops), AnswerParser(plan, "r", 0))


def packed(ids: list[int]) -> memoryview:
    return memoryview(array("I", ids).tobytes())


class Had:
    """What a reader has been told."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[tuple[str, str, str]] = []

    def take(self, parsed: ParsedText) -> None:
        self.text += parsed.text
        self.reasoning += parsed.reasoning
        for piece in parsed.calls:
            self._take(piece)

    def _take(self, piece: pb.ToolCallDelta) -> None:
        if piece.id:
            assert piece.index == len(self.calls)
            self.calls.append((piece.id, piece.name, ""))
        ident, name, arguments = self.calls[piece.index]
        self.calls[piece.index] = ident, name, arguments + piece.arguments

    def sizes(self) -> tuple[int, int, int]:
        calls = sum(len(name.encode()) + len(arguments.encode()) for _, name, arguments in self.calls)
        return len(self.text.encode()), len(self.reasoning.encode()), calls


@settings(max_examples=600, deadline=None)
@given(
    written=WRITTEN, form=st.sampled_from(["hermes", "mistral"]), cut_off=st.integers(0, 3), left_after=st.integers(0, 80),
    step=st.integers(1, 9), hears_end=st.booleans(), stops=st.sampled_from([[], ["zz"]]),
)  # fmt: skip
@example(written="<think>so \n", form="hermes", cut_off=0, left_after=80, step=9, hears_end=True, stops=[])
@example(written="[TOOL_CALLS]add", form="mistral", cut_off=0, left_after=80, step=9, hears_end=True, stops=[])
@example(written=CALL, form="hermes", cut_off=20, left_after=80, step=9, hears_end=True, stops=[])
def test_whatever_the_first_reader_had_the_second_has_the_rest(
    written: str, form: str, cut_off: int, left_after: int, step: int, hears_end: bool, stops: list[str]
) -> None:
    data = written.encode()
    ids = list(data[: len(data) - cut_off] if cut_off < len(data) else data)
    whole, alone = Had(), made(form, stops)
    alone.receive(0, packed(ids))
    alone.end(END)
    whole.take(alone.take().parsed)

    first, had, at = made(form, stops), Had(), 0
    while at < len(ids) and at < left_after:
        first.receive(at, packed(ids[at : at + step]))
        at = min(at + step, len(ids))
        if hears_end and at == len(ids):
            first.end(END)
        had.take(first.take().parsed)

    second = made(form, stops)
    second.receive(0, packed(ids[:at]))
    second.skip(*had.sizes())
    second.receive(at, packed(ids[at:]))
    second.end(END)
    had.take(second.take().parsed)
    assert (had.text, had.reasoning, had.calls) == (whole.text, whole.reasoning, whole.calls)
