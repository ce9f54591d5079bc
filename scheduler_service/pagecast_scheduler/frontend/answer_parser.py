"""From an answer's text to its typed parts: which forms a request's output is read with, and the parser of one sequence."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.call_forms import FORCED, CallFormat, call_format_of
from pagecast_scheduler.frontend.call_reader import CallReader
from pagecast_scheduler.frontend.chat import ChatTemplate
from pagecast_scheduler.frontend.errors import field_violation
from pagecast_scheduler.frontend.output_parts import (
    CallArguments,
    CallStart,
    Part,
    Reasoning,
    ReasoningFormat,
    ReasoningSplitter,
    Text,
    reasoning_format_of,
)
from pagecast_wire.sampling import Constraint


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How a request's output is read. reasoning_is_open: the prompt ends inside the reasoning. tools: names of the functions offered."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasoning_is_open: bool = False
    tools: frozenset[str] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether text is delivered as it is."""
        return self.calls is None and self.reasoning is None

    @property
    def shown_specials(self) -> tuple[str, ...]:
        """Special tokens that are to be decoded although they are hidden, because the forms are written with them."""
        shown = () if self.calls is None else self.calls.shown
        return shown if self.reasoning is None else (*shown, self.reasoning.opening, self.reasoning.closing)


def plan_answer(
    spec: Any, wants_reasoning: bool | None, wants_calls: bool | None, template: ChatTemplate | None, rendered: str
) -> AnswerPlan:
    """The forms for a request. wants_...: what the request says, None for nothing. rendered: the text that its chat became.

    Raises Refusal where a form is asked for that is not known.
    """
    is_chat = spec.WhichOneof("input") == "chat"
    is_constrained = spec.HasField("constraint")
    source = template.source if template is not None else ""
    tools = frozenset(tool.name for tool in spec.chat.tools) if is_chat else frozenset()
    choice = spec.chat.tool_choice.mode if is_chat else pb.TOOL_CHOICE_MODE_NONE
    calls = reasoning = None
    offered = bool(tools) and choice != pb.TOOL_CHOICE_MODE_NONE
    if choice != pb.TOOL_CHOICE_MODE_REQUIRED and (wants_calls or (wants_calls is None and offered and not is_constrained)):
        calls = call_format_of(source)
        if calls is None and wants_calls:
            raise field_violation("spec.output.parse_tool_calls", "the form of this model's tool calls is not known")
    if choice == pb.TOOL_CHOICE_MODE_REQUIRED:
        calls = FORCED
    if wants_reasoning or (wants_reasoning is None and is_chat):
        reasoning = reasoning_format_of(source)
        if reasoning is None and wants_reasoning:
            raise field_violation("spec.output.parse_reasoning", "the form of this model's reasoning is not known")
    is_open = reasoning is not None and rendered.rstrip().endswith(reasoning.opening)
    return AnswerPlan(calls, reasoning, is_open, tools)


def behind_reasoning(constraint: Constraint | None, answer: AnswerPlan, rendered: str) -> Constraint | None:
    """The request's constraint, holding from the end of its reasoning where that is read. rendered: as in `plan_answer`.

    A prompt that ends with a closed section, as templates write it when thinking is switched off, leaves none to come."""
    form = answer.reasoning
    if constraint is None or form is None or rendered.rstrip().endswith(form.closing):
        return constraint
    return Constraint(constraint.kind, constraint.text, "" if answer.reasoning_is_open else form.opening, form.closing)


def call_id(request_id: str, sequence: int, index: int) -> str:
    """The id of a tool call; the same whoever reads the answer."""
    return "call_" + hashlib.sha256(f"{request_id}\n{sequence}\n{index}".encode()).hexdigest()[:24]


@dataclass(slots=True)
class ParsedText:
    """What a piece of output holds: text, reasoning, and pieces of tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[pb.ToolCallDelta] = field(default_factory=list)


class AnswerParser:
    """Reads one sequence's text as it comes."""

    def __init__(self, plan: AnswerPlan, request_id: str, sequence: int) -> None:
        self._splitter = None if plan.reasoning is None else ReasoningSplitter(plan.reasoning, plan.reasoning_is_open)
        self._reader = None if plan.calls is None else CallReader(plan.calls.form, plan.tools)
        self._request_id = request_id
        self._sequence = sequence
        self._num_calls = 0

    def push(self, text: str) -> ParsedText:
        """What these next characters complete."""
        return self._gather(self._read([Text(text)] if self._splitter is None else self._splitter.push(text)))

    def flush(self) -> ParsedText:
        """What the end of the output releases; call once."""
        parts = self._read([] if self._splitter is None else self._splitter.flush())
        return self._gather([*parts, *(self._reader.flush() if self._reader is not None else [])])

    def _read(self, parts: Sequence[Part]) -> list[Part]:
        if self._reader is None:
            return list(parts)
        return [made for part in parts for made in (self._reader.push(part.text) if isinstance(part, Text) else [part])]

    def _gather(self, parts: Sequence[Part]) -> ParsedText:
        found = ParsedText()
        for part in parts:
            match part:
                case Text(text):
                    found.text += text
                case Reasoning(text):
                    found.reasoning += text
                case CallStart(name):
                    ident = call_id(self._request_id, self._sequence, self._num_calls)
                    found.calls.append(pb.ToolCallDelta(index=self._num_calls, id=ident, name=name))
                    self._num_calls += 1
                case CallArguments(text):
                    if found.calls:
                        found.calls[-1].arguments += text
                    else:
                        found.calls.append(pb.ToolCallDelta(index=self._num_calls - 1, arguments=text))
        return found
