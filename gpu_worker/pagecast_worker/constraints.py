"""Structured output: compiles constraints aside, follows each constrained row's tokens, and says what its next one may be.

One owner, on the CPU: llguidance's matchers. A constraint is compiled once and copied for every row; a row that enters with a history has
it replayed, so preemption and recovery need nothing kept. Masks of a step are built in parallel while the device works.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagecast_kernels.reference_token_rules import EARLY
from pagecast_wire.codec import view_u32
from pagecast_wire.constraints import constraint_digest, grammar_of, limits
from pagecast_wire.plan import Admission
from pagecast_wire.result import FLAG_BAD, FLAG_DEAD, FLAG_IDLE, FLAG_LARGE, FLAG_STOP
from pagecast_wire.sampling import Constraint, ConstraintFault, SamplingParams
from pagecast_worker.executor import Prepared
from pagecast_worker.row_book import Forced, Int
from pagecast_worker.token_rules import Masks
from pagecast_worker.vocabulary import VocabularyError

COMPILE_SECONDS = 5.0
"""A constraint that takes longer to compile is refused. llguidance's own limits end the work soon after."""
COMPILERS = 2
MOST_AHEAD = 256
"""Forced tokens that are looked for at a time: a grammar may force without end."""
MAX_KEPT = 512
"""Compiled constraints kept; the least recently used go first. More than a scheduler counts on."""

_TOO_LARGE = ("too big", "too large", "too many", "too complex", "toocomplex", "max is")
"""Words of llguidance's messages about its limits."""
_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Follower:
    """One constrained row's matcher. stops: the row's stop ids. ends: the model's end tokens, which end it whether among them or not.
    ended: an end token was chosen, or the row is dead: whatever comes is meaningless. ahead: forced tokens that the matcher has taken and
    the row has not; until they are used up each is the only one allowed. tells: the scheduler may have the row jump over them; told: it
    has been told of all that are ahead."""

    matcher: LLMatcher | None
    stops: frozenset[int]
    ends: frozenset[int]
    fault: ConstraintFault = ConstraintFault.NONE
    tells: bool = False
    ended: bool = False
    ahead: list[int] = field(default_factory=list)
    told: bool = True

    def begin(self, history: list[int]) -> None:
        """A row's output so far. What is forced is found as it was when the row drew it."""
        self._look_ahead()
        for token in history:
            self._follow(token)

    def take(self, token: int, flags: int) -> int:
        """The row's next token and flags, as the device has them. Returns the flags that are true."""
        if self.ended or flags & FLAG_IDLE:
            return flags
        if self.fault and not flags & FLAG_BAD:
            self.ended = True
            return FLAG_DEAD | (FLAG_LARGE if self.fault == ConstraintFault.TOO_LARGE else 0)
        if flags & (FLAG_BAD | FLAG_DEAD):
            self.ended = True
            return flags
        if token in self.ends:
            flags |= FLAG_STOP
        self.ended = bool(flags & FLAG_STOP)
        self._follow(token)
        return flags

    def jump(self, tokens: list[int]) -> None:
        """The row takes forced tokens without drawing them."""
        for token in tokens:
            if not self.ended and not self.fault:
                self._follow(token)

    def news(self) -> list[int]:
        """Forced tokens behind the one last taken that nobody was told of; none of them ends the row."""
        if self.told or not self.tells or self.ended or self.fault:
            return []
        self.told = True
        return list(takewhile(lambda token: token not in self.stops and token not in self.ends, self.ahead))

    def _follow(self, token: int) -> None:
        assert self.matcher is not None
        if self.ahead:
            if self.ahead.pop(0) != token:
                self.fail()
        elif not self.matcher.consume_token(token):
            self.fail()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Once nothing is ahead: the tokens that must follow, as llguidance's own masks would allow them one by one."""
        if self.ahead or self.ended or self.fault or self.matcher is None:
            return
        while len(self.ahead) < MOST_AHEAD and (forced := self.matcher.compute_ff_tokens()):
            if not self.matcher.consume_tokens(forced):
                break
            self.ahead += forced
            self.told = False

    def fail(self) -> None:
        """The matcher can go no further."""
        message = self.matcher.get_error().lower() if self.matcher is not None else ""
        reason = self.matcher.stop_reason().lower() if self.matcher is not None else ""
        large = any(word in message or word in reason for word in _TOO_LARGE)
        self.fault = ConstraintFault.TOO_LARGE if large else ConstraintFault.NO_TOKEN


@dataclass(slots=True)
class _Compiled:
    """A constraint's matcher before its first token, or why there is none."""

    matcher: LLMatcher | None = None
    fault: ConstraintFault = ConstraintFault.NONE


@dataclass(slots=True)
class _Job:
    """One answer for one request to prepare: whichever of compiler and clock comes first."""

    done: Prepared
    digest: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: bool = False

    def answer(self, fault: ConstraintFault) -> None:
        with self.lock:
            if self.answered:
                return
            self.answered = True
        self.done(self.digest, fault)


class ConstraintBook:
    """Rows' followers, and compiled constraints by digest. Everything but `prepare`'s work runs on the caller's thread."""

    def __init__(self, open_vocabulary: Callable[[], LLTokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.ends = frozenset(eos_token_ids)
        self.rows: dict[int, Follower] = {}
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="constraints")
        self._vocabulary: Future[LLTokenizer] = self._compilers.submit(open_vocabulary)
        self._compiled: OrderedDict[bytes, Future[_Compiled]] = OrderedDict()
        self._masks: LLExecutor | None = None

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def clear(self) -> None:
        """No row is constrained; what was compiled stays."""
        self.rows.clear()

    def prepare(self, constraint: Constraint, done: Prepared) -> None:
        """Compile it aside. done is called once, from another thread, with the constraint's digest and what is wrong with it."""
        digest = constraint_digest(constraint)
        job = _Job(done, digest)
        future = self._compiling(digest, constraint)

        def started(_: "Future[LLTokenizer]") -> None:  # reading the vocabulary is not the constraint's time
            clock = threading.Timer(COMPILE_SECONDS, job.answer, (ConstraintFault.TIMED_OUT,))
            clock.daemon = True
            clock.start()
            future.add_done_callback(lambda _: clock.cancel())

        self._vocabulary.add_done_callback(started)
        future.add_done_callback(lambda made: None if made.cancelled() else job.answer(made.result().fault))

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Rows get new owners; a history is replayed. A constraint that was forgotten since it was prepared is compiled here and now."""
        for admission in admissions:
            self.rows.pop(admission.row, None)
            constraint = admission.sampling.constraint
            if constraint is None:
                continue
            compiled = self._compiling(constraint_digest(constraint), constraint).result()
            matcher = None if compiled.matcher is None else compiled.matcher.deep_copy()
            follower = Follower(matcher, frozenset(view_u32(admission.stop_token_ids).tolist()), self.ends, compiled.fault)
            follower.tells = may_jump(admission.sampling)
            if matcher is not None:
                follower.begin(view_u32(admission.tokens)[admission.num_prompt_tokens :].tolist())
            self.rows[admission.row] = follower

    def take(self, forced: Forced) -> None:
        """Rows take forced tokens, behind those of all plans before."""
        for row, end, count in zip(forced.rows.tolist(), np.cumsum(forced.counts).tolist(), forced.counts.tolist(), strict=True):
            self.rows[row].jump(forced.tokens[end - count : end].tolist())

    def masks(self, followers: list[Follower], at: Int, kinds: NDArray[np.int32]) -> Masks:
        """What each follower allows next. at: where it stands among the step's K rows with rules, whose kinds int32[K] may lose EARLY:
        a finished structure ends, whatever min_output_tokens says."""
        lines = np.zeros((max(1, len(followers)), -(-self.vocab_size // 32)), np.int32)
        index = np.full(len(kinds), -1)
        asked: list[tuple[LLMatcher, int]] = []
        known: list[int] = []
        for line, follower in enumerate(followers):
            if follower.matcher is None or follower.ended or follower.fault:
                continue
            if follower.ahead:
                only(lines[line], follower.ahead[0])
            else:
                asked.append((follower.matcher, line))
            known.append(line)
        if asked:
            if self._masks is None:
                self._masks = LLExecutor()
            self._masks.unsafe_compute_mask_ptr(asked, lines.ctypes.data, lines.shape[1] * 4, len(lines))
        for line in known:
            follower, place = followers[line], int(at[line])
            if not follower.ahead and follower.matcher is not None and follower.matcher.is_error():
                follower.fail()
                continue
            index[place] = line
            if kinds[place] & EARLY and not _without(lines[line], follower.stops).any():
                kinds[place] &= ~EARLY
        return Masks(index, lines)

    def _compiling(self, digest: bytes, constraint: Constraint) -> "Future[_Compiled]":
        future = self._compiled.get(digest)
        if future is None:
            future = self._compiled[digest] = self._compilers.submit(self._compile, constraint)
            while len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(digest)
        return future

    def _compile(self, constraint: Constraint) -> _Compiled:
        try:
            vocabulary = self._vocabulary.result()
            matcher = LLMatcher(vocabulary, grammar_of(constraint, vocabulary), log_level=0, limits=limits())
        except VocabularyError as error:
            _log.warning("no vocabulary for structured output", reason=str(error))
            return _Compiled(fault=ConstraintFault.INVALID)
        except (ValueError, RuntimeError):
            return _Compiled(fault=ConstraintFault.INVALID)
        if not matcher.is_error():
            return _Compiled(matcher)
        message = matcher.get_error().lower()
        large = any(word in message for word in _TOO_LARGE)
        return _Compiled(fault=ConstraintFault.TOO_LARGE if large else ConstraintFault.INVALID)


def may_jump(sampling: SamplingParams) -> bool:
    """Whether a row's forced tokens need not be drawn: nothing is told of them, and no other rule could forbid one."""
    return sampling.num_logprobs < 0 and not sampling.allowed_token_ids and not sampling.bad_word_lengths


def only(line: NDArray[np.int32], token: int) -> None:
    """One token in a mask of none."""
    line.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)


def _without(line: NDArray[np.int32], ids: frozenset[int]) -> NDArray[np.int32]:
    """A mask with the bits of some ids cleared."""
    cleared = line.copy()
    words = cleared.view(np.uint32)
    for token in ids:
        words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return cleared
