"""What a stream that is taken up again repeats, the caller does not see again."""

from pagecast.errors import Unavailable
from pagecast.resuming import Position
from pagecast.v1 import generation_pb2 as pb


def prompt(first: int, count: int) -> pb.StreamEvent:
    records = [pb.TokenLogprob(token_id=first + at) for at in range(count)]
    return pb.StreamEvent(seq=9, prompt=pb.PromptEvent(first_position=first, logprobs=records))


def test_records_of_the_prompt_are_told_once_however_they_are_cut() -> None:
    position, seen = Position.of(pb.GenerateStreamRequest(), None, True), list[int]()
    events = [prompt(0, 5), prompt(5, 3), prompt(0, 7), prompt(7, 4), prompt(11, 2), prompt(0, 13), prompt(13, 1)]
    for number, event in enumerate(filter(None, map(position.take, events)), 1):
        assert event.seq == number and event.prompt.first_position == len(seen)
        seen += [record.token_id for record in event.prompt.logprobs]
    assert seen == list(range(14))


def test_the_last_positions_alone_need_not_begin_at_the_first() -> None:
    position = Position.of(pb.GenerateStreamRequest(), None, True)
    assert [position.take(event) is not None for event in (prompt(20, 4), prompt(20, 4), prompt(22, 3))] == [True, False, True]


def test_a_resume_says_how_much_the_caller_has_of_every_part() -> None:
    position = Position.of(pb.GenerateStreamRequest(), None, True)
    calls = [pb.ToolCallDelta(index=0, id="c", name="größe", arguments='{"a"'), pb.ToolCallDelta(index=0, arguments=": 1}")]
    parts = [{"text": "ü"}, {"reasoning_text": "hm €"}, {"tool_calls": calls}, {"text": "a", "reasoning_text": " "}]
    for at, part in enumerate(parts):
        position.take(pb.StreamEvent(seq=at + 1, tokens=pb.TokensEvent(sequence_index=2, first_token_offset=3 * at, num_tokens=3, **part)))
    broken = Unavailable("UNAVAILABLE", "gone")
    assert position.wait_after(broken) >= 0
    resume = position.resume_request()
    assert resume is not None
    wanted = pb.SequenceCursor(sequence_index=2, next_token_offset=12, text_bytes=3, reasoning_bytes=7, tool_call_bytes=15)
    assert list(resume.cursors) == [wanted]
