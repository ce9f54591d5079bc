"""What a stream that is taken up again repeats, the caller does not see again."""

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
