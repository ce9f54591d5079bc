"""One output sequence of a request: ids received, how many are delivered, and what is derived from them.

Ids stay packed until somebody wants text. Text, log-probabilities and typed parts are made from the ids alone, so they agree.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pagecast_scheduler.frontend.answer_parser import AnswerParser, ParsedText
from pagecast_scheduler.frontend.detokenizer import Detokenizer
from pagecast_scheduler.frontend.reader_fit import ReaderFit
from pagecast_wire.intake import Finished, TokenLogprobs, Usage
from pagecast_wire.sampling import FinishReason


@dataclass(slots=True)
class Output:
    """New output of a sequence. first: offset of the first id. logprobs: empty, or one record for each id."""

    first: int
    ids: "array[int]"
    parsed: ParsedText
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.ids or self.parsed.text or self.parsed.reasoning or self.parsed.calls)


class OutputSequence:
    """One output sequence: ids received, how many are delivered, and its text."""

    def __init__(self, index: int, detokenizer: Detokenizer | None, eager: bool, parser: AnswerParser | None = None) -> None:
        """detokenizer: None when neither text nor a stop text is wanted. eager: text is made on arrival, to find stop texts at once.
        parser: None when the text is delivered as it is."""
        self.index = index
        self.ids = array("I")
        self.num_delivered = 0
        self.finished: Finished | None = None
        self.is_reported = False
        self._detokenizer = detokenizer
        self._eager = eager
        self._parser = parser
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[tuple[int, str]] = []  # (tokens up to the end of which it was released, text)
        self._fit: ReaderFit | None = None  # what a resuming reader has
        self._keep: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that belong to the output: all received, or those up to the one that completed a stop text."""
        return len(self.ids) if self._keep is None else self._keep

    @property
    def matched_stop(self) -> str | None:
        """The stop text that ended the sequence."""
        return None if self._detokenizer is None else self._detokenizer.matched

    def receive(self, offset: int, tokens: memoryview) -> bool:
        """Takes tokens (packed u32) whose first has this offset; repeated ones are dropped. Returns whether a stop text was completed.

        Raises IndexError on a gap.
        """
        if self._keep is not None:
            return False  # sampled before the scheduler heard of the stop text
        ids = self.ids
        known = len(ids)
        if offset != known:
            if offset > known:
                raise IndexError(f"token offset {offset} after {known} tokens")
            tokens = tokens[4 * (known - offset) :]
        ids.frombytes(tokens)
        if self._eager:
            return self._advance(known)
        return False

    def receive_logprobs(self, record: TokenLogprobs) -> None:
        """Takes the record of one token; one that is known is dropped. Raises IndexError on a gap."""
        if self._keep is not None:
            return
        if record.offset > len(self._logprobs):
            raise IndexError(f"log-probability of token {record.offset} after {len(self._logprobs)}")
        if record.offset == len(self._logprobs):
            self._logprobs.append(record)

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Records of the tokens received so far."""
        return self._logprobs

    def _advance(self, start: int) -> bool:
        detokenizer = self._detokenizer
        assert detokenizer is not None
        for end in range(start, len(self.ids)):
            if text := detokenizer.push(self.ids[end : end + 1]):
                self._text.append((end + 1, text))
            if detokenizer.matched is not None:
                break
        return self._note_match()

    def _note_match(self) -> bool:
        detokenizer = self._detokenizer
        if detokenizer is None or detokenizer.matched is None or self._keep is not None:
            return False
        self._keep = detokenizer.keep
        del self.ids[self._keep :]
        return True

    def end(self, finished: Finished) -> None:
        """The scheduler says that the sequence is over."""
        self.finished = finished

    @property
    def is_delivered(self) -> bool:
        """Whether all tokens received so far are delivered."""
        return self.num_delivered >= self.num_output_tokens

    def take(self, limit: int = 0) -> Output:
        """What has not been delivered yet, of at most `limit` tokens (0: all), now counted as delivered."""
        first, end = self.num_delivered, self.num_output_tokens
        if limit:
            end = min(end, first + limit)
        ids = self.ids[first:end]
        self.num_delivered = end
        if self._detokenizer is not None:
            if not self._eager:
                self._text.append((end, self._detokenizer.push(ids)))
            if self.finished is not None and self.is_delivered:
                self._text.append((end, self._detokenizer.flush()))
                self._note_match()
        released = len(self._text) if self.is_delivered else sum(at <= end for at, _ in self._text)
        text = "".join(piece for _, piece in self._text[:released])
        del self._text[:released]
        parsed = self._parsed(text)
        if self._fit is not None:
            parsed = self._fit.next(parsed)
        return Output(first, ids, parsed, self._logprobs[first:end])

    def skip(self, text_bytes: int | None = None, reasoning_bytes: int | None = None, tool_call_bytes: int | None = None) -> None:
        """A resuming reader has all tokens received so far. ..._bytes: how much of each it has; None: what those tokens release."""
        self._fit = ReaderFit(self.take().parsed, text_bytes, reasoning_bytes, tool_call_bytes)

    def receive_earlier_logprobs(self, records: Sequence[TokenLogprobs]) -> None:
        """Records kept for a reader that resumes. There are none of tokens from before a scheduler was lost: NaN stands for them."""
        for record in records:
            while len(self._logprobs) < record.offset:
                self._logprobs.append(TokenLogprobs(record.key, record.sequence, len(self._logprobs), float("nan")))
            self.receive_logprobs(record)

    def _parsed(self, text: str) -> ParsedText:
        if self._parser is None:
            return ParsedText(text)
        parsed = self._parser.push(text)
        if self.finished is not None and self.is_delivered:
            last = self._parser.flush()
            parsed = ParsedText(parsed.text + last.text, parsed.reasoning + last.reasoning, parsed.calls + last.calls)
        return parsed

    def result(self) -> tuple[FinishReason, str | None, int | None, Usage]:
        """Reason, matched stop text or stop token id, and usage of a finished sequence; a stop text found here outranks the rest."""
        assert self.finished is not None
        usage = self.finished.usage
        if self.matched_stop is not None:
            return FinishReason.STOP, self.matched_stop, None, msgspec.structs.replace(usage, output_tokens=self.num_output_tokens)
        stop_id = self.finished.stop_token_id
        return self.finished.reason, None, stop_id if stop_id >= 0 else None, usage
