"""Prompts that wait and are in no hurry, by how much output follows each: how fast they have to be computed.

Of many requests whose last end is all that counts, the longest output decides when that is. Another one may start as many steps later as
it is shorter, and still end before it. Prompts computed no sooner than that share steps with decodes, which read the weights anyway.
"""

import numpy as np
from numpy.typing import NDArray

from pagecast_scheduler.core.request import Sequence

GRAIN = 16
"""Output tokens of one class."""


class Backlog:
    """Sums over waiting sequences. num_sequences: how many they are."""

    def __init__(self, max_model_len: int) -> None:
        self._tokens = np.zeros(max_model_len // GRAIN + 1, np.int64)
        self._counts = np.zeros(max_model_len // GRAIN + 1, np.int64)
        self._sums: tuple[NDArray[np.int64], NDArray[np.int64], int] | None = None
        """(Output tokens of a class, prompt tokens up to it, the longest first; output of all.)"""
        self.num_sequences = 0

    def add(self, seq: Sequence, sign: int = 1) -> None:
        """The sequence waits. sign -1: it waits no longer."""
        at = (seq.request.max_tokens - seq.num_tokens) // GRAIN
        self._tokens[at] += sign * seq.num_tokens
        self._counts[at] += sign
        self.num_sequences += sign
        self._sums = None

    def is_of(self, sequences: list[Sequence]) -> bool:
        """Whether exactly these wait."""
        other = Backlog((len(self._tokens) - 1) * GRAIN)
        for seq in sequences:
            other.add(seq)
        return bool((other._tokens == self._tokens).all() and (other._counts == self._counts).all())

    def prompt_tokens(self) -> int:
        """Tokens that they have now, what was put out before they were preempted included."""
        return int(self._tokens.sum())

    def output_tokens(self) -> int:
        """Output that all of them may still have, at most."""
        return self._summed()[2]

    def longest(self) -> int:
        """Of these outputs; 0: none waits."""
        outputs = self._summed()[0]
        return int(outputs[0]) if len(outputs) else 0

    def _summed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        if self._sums is None:
            classes: NDArray[np.int64] = np.flatnonzero(self._counts)[::-1]
            outputs = classes * GRAIN + GRAIN - 1
            self._sums = outputs, np.cumsum(self._tokens[classes]), int((self._counts[classes] * outputs).sum())
        return self._sums

    def tokens_a_step(self, last: int, begun: int, begun_output: int) -> tuple[float, int]:
        """Prefill tokens that every step must compute so that all end with the longest output, and for how many steps from now on
        none of them could be computed without somebody ending later than that.

        last: output tokens that the longest of all, running or not, has left. begun: prompt tokens left of sequences that have a row, of
        which the most urgent has begun_output more to follow, 0 of none. What waits comes after them, the longest first.
        """
        outputs, tokens, _ = self._summed()
        needed = begun / (last - begun_output + 1)
        if len(outputs):
            needed = max(needed, float(((tokens + begun) / (last + 1 - outputs)).max()))
        return needed, last - max(begun_output, self.longest())
