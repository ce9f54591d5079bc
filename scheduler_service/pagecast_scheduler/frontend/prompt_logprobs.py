"""Log-probabilities of a prompt's tokens, gathered until they are delivered."""

from pagecast_wire.intake import PromptLogprobs, Submit


class PromptRecords:
    """Parts that have arrived, in order; parts that come again after a scheduler was lost are dropped."""

    def __init__(self, submit: Submit, max_positions: int | None = None) -> None:
        """max_positions: the last so many are delivered; None: all."""
        self.prompt = submit.prompt
        self._has_all = max_positions is None or max_positions >= len(submit.prompt) // 4
        self._begin = 1 if max_positions is None else max(1, len(submit.prompt) // 4 - max_positions)
        self.num_next = 1
        self.parts: list[PromptLogprobs] = []  # all, in order
        self._new: list[tuple[int, PromptLogprobs]] = []
        if len(submit.prompt) == 4:  # position 0 alone, of which workers tell nothing
            self._new.append((0, PromptLogprobs(submit.key, 1, 0, b"")))

    @property
    def has_origin(self) -> bool:
        """Whether position 0, which has no log-probability, is delivered too."""
        return self._begin == 1 and self._has_all

    @property
    def has_new(self) -> bool:
        """Whether something is to be delivered."""
        return bool(self._new)

    def receive(self, part: PromptLogprobs) -> bool:
        """Takes a part. Whether it held anything new; raises IndexError on a gap."""
        end = part.start + len(part.logprobs) // 4
        if part.start > self.num_next:
            raise IndexError(f"prompt position {part.start} after {self.num_next}")
        if end <= self.num_next:
            return False
        if end > self._begin:
            self._new.append((max(self.num_next, self._begin) - part.start, part))
        self.parts.append(part)
        self.num_next = end
        return end > self._begin

    def take(self) -> list[tuple[int, PromptLogprobs]]:
        """What was not delivered yet: (records to pass over, part) each."""
        new, self._new = self._new, []
        return new
