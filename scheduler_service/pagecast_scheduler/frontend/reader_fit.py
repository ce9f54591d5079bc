"""What a resuming reader is still to get of an output whose tokens, or some of them, it has already.

The end of a sequence releases what was held back (an incomplete character, white space of the reasoning, the beginning of a mark), and no
token stands for that: a reader that had the last event, and not the word of the end, would get it again. So it says in bytes what it has.
"""

from pagecast.v1 import generation_pb2 as pb
from pagecast_scheduler.frontend.answer_parser import ParsedText


class ReaderFit:
    """Cuts an output to one reader: holds what it lacks of what its tokens released, and counts what it has beyond that."""

    def __init__(self, released: ParsedText, text: int | None, reasoning: int | None, calls: int | None) -> None:
        """released: by the reader's tokens. text, reasoning, calls: bytes that it has; None: what is released."""
        self._text, self._reasoning = _Bytes(released.text, text), _Bytes(released.reasoning, reasoning)
        self._calls, self._to_drop = ([], 0) if calls is None else _without(released.calls, calls)

    def next(self, parsed: ParsedText) -> ParsedText:
        """Of what comes next, that which the reader lacks; at first with what it lacked before."""
        calls, self._to_drop = _without(parsed.calls, self._to_drop)
        calls, self._calls = self._calls + calls, []
        return ParsedText(self._text.next(parsed.text), self._reasoning.next(parsed.reasoning), calls)


class _Bytes:
    """The same for one text."""

    def __init__(self, released: str, had: int | None) -> None:
        data = released.encode()
        self._ahead = b"" if had is None else data[had:]
        self._to_drop = 0 if had is None else max(0, had - len(data))

    def next(self, text: str) -> str:
        if not (self._ahead or self._to_drop):
            return text
        data = self._ahead + text.encode()
        dropped = min(len(data), self._to_drop)
        self._ahead, self._to_drop = b"", self._to_drop - dropped
        return data[dropped:].decode(errors="ignore")


def _without(calls: list[pb.ToolCallDelta], num_bytes: int) -> tuple[list[pb.ToolCallDelta], int]:
    """The pieces but for so many bytes of names and arguments at their beginning, and how many of those were not there. A name is had
    whole, or not."""
    left = []
    for call in calls:
        name, arguments = call.name.encode(), call.arguments.encode()
        if num_bytes < len(name) or not num_bytes:
            num_bytes = 0
            left.append(call)
            continue
        cut = min(len(arguments), num_bytes - len(name))
        num_bytes -= len(name) + cut
        if cut < len(arguments):
            left.append(pb.ToolCallDelta(index=call.index, arguments=arguments[cut:].decode(errors="ignore")))
    return left, num_bytes
