"""Drives an executor with plans made by hand: a scheduler reduced to what a test wants to control."""

from dataclasses import dataclass, field

import numpy as np

from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.result import FLAG_IDLE, FLAG_STOP, StepResult
from pagecast_wire.sampling import SamplingParams


@dataclass
class Job:
    """One sequence. output: what it has sampled. While in a row: known tokens at admission, computed by chunks, planned in all."""

    prompt: list[int]
    max_output: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stop_token_ids: list[int] = field(default_factory=list)
    min_output: int = 0
    sequence: int = 0
    output: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    planned: int = 0
    decoding: bool = False
    row: int = -1

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_output or bool(self.flags and self.flags[-1] & FLAG_STOP)


class Driver:
    """Blocks are handed out in a scrambled order, so that tables are never the identity.

    in_flight: (steps, jobs that sample) of each plan whose result was not collected.
    """

    def __init__(self, executor, num_blocks: int, *, max_num_seqs: int = 16, max_model_len: int = 2048, budget: int = 2048, epoch: int = 1):
        self.executor = executor
        self.block_size = executor.config.block_size
        executor.start_epoch(StartEpoch(epoch, num_blocks, self.block_size, max_num_seqs, max_model_len, budget))
        self.free = np.random.default_rng(5).permutation(np.arange(1, num_blocks)).tolist()
        self.rows: dict[int, Job] = {}
        self.epoch = epoch
        self.step = 0
        self.max_num_seqs = max_num_seqs
        self.in_flight: list[tuple[int, list[Job]]] = []
        self._released: list[int] = []
        self._admissions: list[Admission] = []
        self._chunks: list[tuple[int, int, int]] = []
        self._grown: list[tuple[int, int]] = []

    def admit(self, job: Job, shared: list[int] | None = None) -> None:
        """Put a job into the lowest free row with its history. shared: full blocks of a common prefix that are computed already."""
        job.row = next(row for row in range(self.max_num_seqs) if row not in self.rows)
        self.rows[job.row] = job
        tokens = job.prompt + job.output
        shared = shared or []
        needed = -(-len(tokens) // self.block_size) - len(shared)
        job.blocks = shared + [self.free.pop() for _ in range(needed)]
        job.computed = len(shared) * self.block_size
        job.known = job.planned = len(tokens)
        job.decoding = False
        self._admissions.append(
            Admission(
                row=job.row, tokens=pack_u32(tokens), num_prompt_tokens=len(job.prompt), blocks=pack_u32(job.blocks),
                num_computed_tokens=job.computed, max_tokens=job.limit, min_tokens=len(job.prompt) + job.min_output,
                stop_token_ids=pack_u32(job.stop_token_ids), sampling=job.sampling,
                sequence=job.sequence,
            )
        )

    def release(self, job: Job, keep_blocks: bool = False) -> None:
        """Empty the job's row: finished, or preempted if it is admitted again."""
        del self.rows[job.row]
        self._released.append(job.row)
        if not keep_blocks:
            self.free = job.blocks + self.free
        job.blocks, job.row = [], -1

    def chunk(self, job: Job, length: int | None = None) -> None:
        """Prefill the next tokens of a job in the coming plan; all that is left if no length is given."""
        left = job.known - job.computed
        length = min(left, length or left)
        self._chunks.append((job.row, job.computed, length))
        job.computed += length

    def start(self, wanted: list[Job], chunk: int | None = None) -> None:
        """Admit these and prefill them, a chunk of each at a time, until all decode."""
        for job in wanted:
            self.admit(job)
        while any(job.computed < job.known for job in wanted):
            for job in wanted:
                if job.computed < job.known:
                    self.chunk(job, chunk)
            self.plan()

    def plan(self, num_steps: int = 1, paused: tuple[int, ...] = ()) -> StepResult:
        """Send the plan gathered so far, wait for it, and give rows that sampled their tokens."""
        self.submit(num_steps, paused)
        return self.collect()

    def submit(self, num_steps: int = 1, paused: tuple[int, ...] = ()) -> None:
        """Send a plan without waiting: rows that will decode get the blocks they need."""
        sampling = []
        decoding = [row for row in sorted(self.rows) if self.rows[row].decoding and row not in paused]
        for row in decoding:
            job = self.rows[row]
            if job.planned < job.limit:
                sampling.append(row)
            for _ in range(min(num_steps, job.limit - job.planned)):
                if job.planned > len(job.blocks) * self.block_size:
                    job.blocks.append(self.free.pop())
                    self._grown.append((row, job.blocks[-1]))
                job.planned += 1
        for row, start, length in self._chunks:
            job = self.rows[row]
            if start + length == job.known:
                sampling.append(row)
                job.decoding = True
                job.planned += 1
        sampling.sort()
        self.step += 1
        columns = [pack_u32([c[i] for c in self._chunks]) for i in range(3)]
        plan = StepPlan(
            self.epoch, self.step, num_steps=num_steps, released=pack_u32(self._released), admissions=tuple(self._admissions),
            grown_rows=pack_u32([g[0] for g in self._grown]), grown_blocks=pack_u32([g[1] for g in self._grown]),
            chunk_rows=columns[0], chunk_starts=columns[1], chunk_lengths=columns[2], paused=pack_u32(list(paused)),
        )
        self._released, self._admissions, self._chunks, self._grown = [], [], [], []
        self.executor.submit(plan)
        self.in_flight.append((num_steps, [self.rows[row] for row in sampling]))

    def collect(self) -> StepResult:
        """The oldest plan's result, its tokens given to their jobs."""
        result = self.executor.collect(wait=True)
        steps, jobs = self.in_flight.pop(0)
        tokens, flags = view_u32(result.tokens).reshape(steps, -1), np.frombuffer(result.flags, np.uint8).reshape(steps, -1)
        assert tokens.shape == (steps, len(jobs)), (tokens.shape, steps, len(jobs))
        for k in range(steps):
            for place, job in enumerate(jobs):
                if not flags[k, place] & FLAG_IDLE and not job.done:
                    job.output.append(int(tokens[k, place]))
                    job.flags.append(int(flags[k, place]))
        return result

    def finish(self) -> None:
        """Decode until every job is done, releasing each as soon as it is."""
        while True:
            for job in [job for job in self.rows.values() if job.done]:
                self.release(job)
            if not self.rows:
                return
            self.plan()


class Later:
    """A download that is not ready until it is waited for, as a device's is not."""

    def __init__(self, download):
        self.download, self.waited = download, False

    def ready(self):
        return self.waited

    def wait(self):
        self.waited = True
        return self.download.wait()
