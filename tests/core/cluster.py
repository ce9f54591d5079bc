"""A scheduler core with a tiny oracle worker and one receiver, in one thread, under the test's control."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from core.tiny_worker import TinyWorker, expected_output

from pagecast_scheduler.core import invariants
from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_scheduler.core.recovery import Loss
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_wire.codec import decode, encode, pack_u32, view_u32, view_u64
from pagecast_wire.intake import KEY_BITS, Accepted, Submit
from pagecast_wire.sampling import FinishReason, SamplingParams, StopRules


def make_config(**values):
    sizes = {"block_size": 4, "num_blocks": 64, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return SchedulerConfig(**{**sizes, "table_checksums": True, **values})


def make_submit(key, prompt, max_output, *, seed=0, stops=(), min_output=0, **values):
    """Front end 0 names the key unless its upper bits say otherwise."""
    stop = StopRules(max_output, min_output, pack_u32(stops))
    values.setdefault("cache_namespace", bytes(32))
    return Submit(key=key, prompt=pack_u32(prompt), sampling=SamplingParams(seed=seed), stop=stop, **values)


def key_of(slot, counter):
    return slot << KEY_BITS | counter


@dataclass
class Stream:
    """What one sequence must produce, and what arrived."""

    expected: list
    by_stop: bool
    tokens: list = field(default_factory=list)
    reason: FinishReason | None = None
    finished: object = None
    keep: int | None = None


class Cluster:
    """Every batch is checked as it arrives: offsets without gap, tokens as the oracle has them, nothing after the end."""

    def __init__(self, vocab=2, bad=lambda tokens: False, **values):
        self.scheduler = Scheduler(make_config(**values), epoch=1)
        self.vocab, self.bad = vocab, bad
        self.worker = TinyWorker(self.scheduler.start_epoch(), vocab, bad)
        self.results = deque()
        self.streams = {}
        self.progress = defaultdict(list)
        self.now = 0
        self.plans = []

    @property
    def state(self):
        return self.scheduler.state

    def submit(self, key, prompt, max_output, **values):
        """The answer; streams of an accepted request are expected from now on."""
        submit = make_submit(key, prompt, max_output, **values)
        answer = self.scheduler.submit(submit, self.now)
        if isinstance(answer, Accepted):
            stops = view_u32(submit.stop.stop_token_ids).tolist()
            for sequence in range(submit.num_sequences):
                want = expected_output(
                    prompt, max_output, submit.sampling.seed, sequence, self.vocab, stops, submit.stop.min_output_tokens
                )  # fmt: skip
                stream = self.streams[key, sequence] = Stream(*want)
                if submit.history:
                    stream.tokens = view_u32(submit.history[sequence]).tolist()
        self.check()
        return answer

    def plan(self):
        """One plan, executed at once by the worker; its result waits to be applied."""
        plan = self.scheduler.plan_step(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.results.append(self.worker.run(plan))
        self.check()
        return plan

    def apply(self):
        result = self.results.popleft()
        self.scheduler.apply_result(result, self.now)
        self.check()

    def fail(self, loss=Loss.CRASH):
        """The worker group is lost with everything in flight."""
        self.scheduler.fail_epoch(self.now, loss)
        self.worker = TinyWorker(self.scheduler.start_epoch(), self.vocab, self.bad)
        self.results.clear()
        self.check()

    def step(self):
        """A plan and its result. False if there was nothing to do."""
        plan = self.plan()
        if plan is None and not self.results:
            return False
        self.apply()
        self.now += 1000
        return True

    def run(self, limit=10_000):
        """Until nothing is left to do. Fails rather than going on for ever, or leaving somebody behind."""
        for _ in range(limit):
            if not self.step():
                assert not self.state.requests, "nothing to do, yet requests are open"
                return
        raise AssertionError(f"not finished after {limit} steps")

    def check(self):
        invariants.check(self.scheduler)
        for slot, batch in self.scheduler.take_batches():
            self._receive(slot, decode(encode(batch), "to_frontend"))

    def _receive(self, slot, batch):
        tokens, start, seen = view_u32(batch.tokens).tolist(), 0, set()
        columns = (view_u64(batch.keys), view_u32(batch.sequences), view_u32(batch.offsets), view_u32(batch.counts))
        for key, sequence, offset, count in zip(*(column.tolist() for column in columns), strict=True):
            stream = self.streams[key, sequence]
            assert key >> KEY_BITS == slot and (key, sequence) not in seen and stream.reason is None and count
            seen.add((key, sequence))
            assert offset == len(stream.tokens), "a gap or a repeat"
            stream.tokens += tokens[start : start + count]
            start += count
            assert stream.tokens == stream.expected[: len(stream.tokens)]
        assert start == len(tokens)
        for progress in batch.progress:
            self.progress[progress.key].append(progress)
        for end in batch.finished:
            self._end(end)

    def _end(self, end):
        stream = self.streams[end.key, end.sequence]
        assert stream.reason is None, "a sequence ended twice"
        stream.reason, stream.finished = end.reason, end
        assert end.usage.output_tokens == min(len(stream.tokens), len(stream.tokens) if stream.keep is None else stream.keep)
        if end.reason is FinishReason.LENGTH:
            assert stream.tokens == stream.expected and not stream.by_stop
        if end.reason is FinishReason.STOP and stream.keep is None:
            assert stream.tokens == stream.expected and stream.by_stop and end.stop_token_id == stream.tokens[-1]
