"""The clients' side: what each stream has received, held against the naive reference and against the rules of its ending.

I2 (no gap, no repeat, the right tokens), I3 (exactly one end per sequence, for a reason that is true) and the counts in Usage.
"""

from dataclasses import dataclass, field

import numpy as np
from sim.oracle import Violation
from sim.reference import VOCABULARY, Stream, stream
from sim.scenario import RequestPlan

from pagecast_wire.codec import pack_u32, view_u32, view_u64
from pagecast_wire.intake import Finished, FrontendBatch, PromptLogprobs, TokenLogprobs
from pagecast_wire.sampling import ConstraintFault, FinishReason
from pagecast_worker.oracle_logprobs import oracle_logprobs


@dataclass(slots=True)
class Output:
    """One sequence as its client sees it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_keep: int = -1  # a stop text was reported: keep so many


@dataclass(slots=True)
class Open:
    """One accepted request. Times are absolute virtual microseconds."""

    plan: RequestPlan
    arrival: int
    outputs: list[Output]
    cancelled: bool = False
    broken: set[int] = field(default_factory=set)  # sequences that the worker flagged for their own NaN
    may_be_poison: bool = False
    num_recoveries: int = 0
    brought_back: bool = False
    prompt_told: int = 1  # position of the first prompt token whose log-probabilities have not come

    @property
    def ended(self) -> bool:
        return all(output.reason is not None for output in self.outputs)


class Streams:
    """Every accepted request, by key."""

    def __init__(self, max_model_len: int, max_recoveries: int) -> None:
        self.requests: dict[int, Open] = {}
        self.open: dict[int, Open] = {}  # those that have not ended
        self._max_model_len, self._max_recoveries = max_model_len, max_recoveries
        self._expected: dict[tuple[int, int], Stream] = {}

    def accept(self, plan: RequestPlan, now: int) -> None:
        self.requests[plan.key] = self.open[plan.key] = Open(plan, now, [Output() for _ in range(plan.num_sequences)])

    def expected(self, plan: RequestPlan, sequence: int) -> Stream:
        """The naive reference for one sequence."""
        known = self._expected.get((plan.key, sequence))
        if known is None:
            limit = min(plan.max_output_tokens, self._max_model_len - len(plan.prompt))
            known = stream(list(plan.prompt), plan.seed, sequence, limit, plan.min_output_tokens, plan.stop_ids, bool(plan.constraint))
            self._expected[plan.key, sequence] = known
        return known

    def history(self, request: Open) -> tuple[bytes, ...]:
        """What a front end sends to bring the request back."""
        return tuple(pack_u32(output.tokens) for output in request.outputs)

    def end_locally(self, request: Open, reason: FinishReason) -> None:
        """The front end ends what is still open by itself (its own cancel, or it is gone)."""
        for output in request.outputs:
            output.reason = output.reason or reason
        self.open.pop(request.plan.key, None)

    def on_batch(self, slot: int, batch: FrontendBatch, now: int) -> None:
        columns = view_u64(batch.keys).tolist(), view_u32(batch.sequences).tolist(), view_u32(batch.offsets).tolist()
        counts, tokens = view_u32(batch.counts).tolist(), view_u32(batch.tokens).tolist()
        if len({len(column) for column in (*columns, counts)}) > 1 or sum(counts) != len(tokens):
            raise Violation(f"batch of step {batch.step}: columns of different lengths")
        start = 0
        for key, sequence, offset, count in zip(*columns, counts):
            self._on_tokens(slot, key, sequence, offset, tokens[start : start + count])
            start += count
        for part in batch.prompt_logprobs:
            self._on_prompt(slot, part)
        for told in batch.logprobs:
            self._on_logprobs(slot, told)
        for key, sequence in zip(*columns[:2]):
            self._check_told(self._find(slot, key), sequence)
        for finished in batch.finished:
            self._on_finished(slot, finished, now)
        for rejected in batch.rejected:
            raise Violation(f"request {rejected.key:#x} rejected ({rejected.reason.name}) in a batch, after it was accepted")
        for progress in batch.progress:
            self._find(slot, progress.key)

    def _find(self, slot: int, key: int) -> Open:
        request = self.requests.get(key)
        if request is None or request.plan.slot != slot:
            raise Violation(f"front end {slot} hears of request {key:#x}, which it does not have")
        return request

    def _on_tokens(self, slot: int, key: int, sequence: int, offset: int, tokens: list[int]) -> None:
        request = self._find(slot, key)
        output = request.outputs[sequence]
        where = f"request {key:#x} sequence {sequence}"
        if output.reason is not None:
            if request.brought_back:
                return  # ended before the scheduler was lost, which cannot know
            raise Violation(f"{where}: tokens after its end ({output.reason.name})")
        if offset != len(output.tokens) or not tokens:
            raise Violation(f"{where}: {len(tokens)} tokens at offset {offset}, expected {len(output.tokens)}")
        wanted = self.expected(request.plan, sequence).tokens[offset : offset + len(tokens)]
        if tokens != wanted:
            raise Violation(f"{where} offset {offset}: tokens {tokens}, the reference says {wanted}")
        if output.stop_keep >= 0:
            raise Violation(f"{where}: tokens after its stop text was reported")
        output.tokens += tokens

    def _on_logprobs(self, slot: int, told: TokenLogprobs) -> None:
        request = self._find(slot, told.key)
        output, plan = request.outputs[told.sequence], request.plan
        if output.reason is not None and request.brought_back:
            return
        where = f"request {told.key:#x} sequence {told.sequence}"
        if told.offset != len(output.logprobs) or told.offset >= len(output.tokens) or plan.num_logprobs < 0:
            raise Violation(f"{where}: log-probabilities at {told.offset}, {len(output.logprobs)} came of {len(output.tokens)} tokens")
        line = (told.logprob, view_u32(told.top_ids).tolist(), np.frombuffer(told.top_logprobs, "<f4").tolist())
        if line != oracle_logprobs(output.tokens[told.offset], plan.num_logprobs, VOCABULARY):
            raise Violation(f"{where}: the log-probabilities at {told.offset} are another token's")
        output.logprobs.append(line)

    def _check_told(self, request: Open, sequence: int) -> None:
        """A token never comes without what is to be told of it, nor before the prompt's log-probabilities."""
        output, plan = request.outputs[sequence], request.plan
        if plan.num_logprobs >= 0 and len(output.logprobs) != len(output.tokens):
            raise Violation(f"request {plan.key:#x}: {len(output.tokens)} tokens, log-probabilities of {len(output.logprobs)}")
        if sequence == 0 and plan.num_prompt_logprobs >= 0 and request.prompt_told != max(1, len(plan.prompt)):
            raise Violation(f"request {plan.key:#x}: a token, but the prompt was told up to {request.prompt_told} of {len(plan.prompt)}")

    def _on_prompt(self, slot: int, part: PromptLogprobs) -> None:
        request = self._find(slot, part.key)
        plan, values, num = request.plan, np.frombuffer(part.logprobs, "<f4").tolist(), part.num_top
        ids, best = view_u32(part.top_ids).tolist(), np.frombuffer(part.top_logprobs, "<f4").tolist()
        again = request.brought_back and part.start <= request.prompt_told
        if num != plan.num_prompt_logprobs or not values or len(ids) != len(best) or len(ids) != num * len(values):
            raise Violation(f"request {part.key:#x}: prompt log-probabilities of the wrong shape")
        if part.start != request.prompt_told and not again:
            raise Violation(f"request {part.key:#x}: prompt log-probabilities from {part.start}, expected {request.prompt_told}")
        for at, value in enumerate(values):
            line = (value, ids[at * num : (at + 1) * num], best[at * num : (at + 1) * num])
            if line != oracle_logprobs(plan.prompt[part.start + at], num, VOCABULARY):
                raise Violation(f"request {part.key:#x}: prompt log-probabilities at {part.start + at} are another token's")
        request.prompt_told = max(request.prompt_told, part.start + len(values))

    def _on_finished(self, slot: int, finished: Finished, now: int) -> None:
        request = self._find(slot, finished.key)
        output = request.outputs[finished.sequence]
        where = f"request {finished.key:#x} sequence {finished.sequence} ended with {FinishReason(finished.reason).name}"
        if output.reason is not None:
            if request.brought_back:
                return
            raise Violation(f"{where} after {output.reason.name}")
        problem = self._problem(request, finished, output, now)
        if problem:
            raise Violation(f"{where}: {problem}")
        output.reason = FinishReason(finished.reason)
        if request.ended:
            del self.open[finished.key]

    def _problem(self, request: Open, finished: Finished, output: Output, now: int) -> str:
        """Why this end cannot be true, or an empty text."""
        plan, usage, received = request.plan, finished.usage, len(output.tokens)
        stops = finished.reason == FinishReason.STOP
        kept = min(output.stop_keep, received) if stops and output.stop_keep >= 0 else received
        if usage.output_tokens != kept:
            return f"usage says {usage.output_tokens} output tokens, the stream has {kept}"
        if usage.prompt_tokens != len(plan.prompt):
            return f"usage says {usage.prompt_tokens} prompt tokens of {len(plan.prompt)}"
        if not 0 <= usage.cached_tokens < len(plan.prompt) + max(received, 1):
            return f"usage says {usage.cached_tokens} cached tokens of {len(plan.prompt)}"
        if min(usage.recomputed_tokens, usage.queue_us, usage.first_token_us, usage.num_preemptions) < 0:
            return f"usage holds a negative number: {usage}"
        if not request.brought_back and usage.total_us != now - request.arrival:
            return f"usage says {usage.total_us} us, it took {now - request.arrival}"
        elapsed = now - request.arrival
        expected = self.expected(plan, finished.sequence)
        whole = received == len(expected.tokens)
        truths = {
            FinishReason.STOP: output.stop_keep >= 0 or (whole and expected.stopped and finished.stop_token_id == expected.tokens[-1]),
            FinishReason.LENGTH: whole and not expected.stopped,
            FinishReason.TIME_LIMIT: 0 <= plan.time_budget_ms * 1000 <= elapsed,
            FinishReason.CANCELLED: request.cancelled,
            FinishReason.DEADLINE_EXCEEDED: 0 <= plan.deadline_ms * 1000 <= elapsed or (plan.deadline_ms >= 0 and not received),
            FinishReason.QUEUE_TIME_EXCEEDED: 0 <= plan.max_queue_ms * 1000 <= elapsed and received == 0,
            FinishReason.NUMERIC_FAULT: finished.sequence in request.broken,
            FinishReason.WORKER_LOST: request.num_recoveries > self._max_recoveries,
            FinishReason.POISON_REQUEST: request.may_be_poison,
            FinishReason.CONSTRAINT_FAILED: self._cannot_go_on(plan, finished, received),
        }
        return "" if truths[FinishReason(finished.reason)] else f"which is not true after {received} of {len(expected.tokens)} tokens"

    def _cannot_go_on(self, plan: RequestPlan, finished: Finished, received: int) -> bool:
        if plan.constraint.startswith("bad"):
            return finished.constraint_fault == ConstraintFault.TOO_LARGE and not received
        return finished.constraint_fault == ConstraintFault.NO_TOKEN and finished.sequence == 0 and received == plan.dead_output
