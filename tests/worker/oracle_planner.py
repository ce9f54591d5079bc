"""A planner of legal but arbitrary plans for the oracle: scattered blocks, chunks, preemption, shared prefixes, pauses, k steps.

Deliberately naive, and not the scheduler's code: what it plans is legal by the text of pagecast_wire.plan alone.
"""

import random
from dataclasses import dataclass, field

from pagecast_wire.codec import pack_u32, view_u32
from pagecast_wire.plan import Admission, StartEpoch, StepPlan
from pagecast_wire.result import FLAG_IDLE, FLAG_STOP, StepResult
from pagecast_wire.sampling import SamplingParams


@dataclass
class Job:
    """One sequence and what is known of it."""

    prompt: list[int]
    limit: int
    seed: int
    sequence: int
    stops: tuple[int, ...]
    minimum: int
    output: list[int] = field(default_factory=list)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    known: int = 0
    computed: int = 0
    done: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Planner:
    """Keeps the jobs and the free blocks; one plan at a time, its result applied before the next."""

    def __init__(self, rng: random.Random, jobs: list[Job], start: StartEpoch) -> None:
        self.rng, self.jobs, self.start = rng, jobs, start
        self.free = list(range(1, start.num_blocks))
        self.rows = list(range(start.max_num_seqs))
        self.holders: dict[int, int] = {}
        self.released: list[int] = []
        self.step = 0
        self.sampling: list[tuple[Job, bool]] = []
        self.num_steps = 1

    def take(self, count: int) -> list[int]:
        self.rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test's pool is too small"
        for block in taken:
            self.holders[block] = 1
        return taken

    def drop(self, job: Job) -> None:
        """Release a row and give back its blocks, at once usable by the same plan."""
        self.released.append(job.row)
        self.rows.append(job.row)
        for block in job.blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)
        job.row, job.blocks, job.computed = -1, [], 0

    def shared_prefix(self, job: Job) -> list[int]:
        """Full blocks of a running job with the same beginning, if there is one (also if they are only planned)."""
        size = self.start.block_size
        for other in self.jobs:
            count = 0
            while other.row >= 0 and other is not job and (count + 1) * size <= min(other.computed, len(job.tokens) - 1):
                if other.tokens[: (count + 1) * size] != job.tokens[: (count + 1) * size]:
                    break
                count += 1
            if count and self.rng.random() < 0.7:
                return other.blocks[:count]
        return []

    def plan(self) -> StepPlan:
        rng, size = self.rng, self.start.block_size
        self.step, self.released, self.sampling = self.step + 1, [], []
        running = [job for job in self.jobs if job.row >= 0]
        for job in running:
            if job.done or rng.random() < 0.05:
                self.drop(job)
        running = [job for job in running if job.row >= 0]
        copies = [(job, i) for job in running for i in range(len(job.blocks)) if rng.random() < 0.02 and self.free]
        pairs = []
        for job, i in copies:
            (target,) = self.take(1)
            old = job.blocks[i]
            pairs.append((old, target, job, i))
        decoding = [job for job in running if job.computed >= job.known]
        paused = [job for job in decoding if rng.random() < 0.1]
        chunks: list[tuple[Job, int, int]] = []
        grown: list[tuple[int, int]] = []
        for job in running:
            if job.computed < job.known and rng.random() < 0.8:
                chunks.append((job, job.computed, rng.randint(1, job.known - job.computed)))
                job.computed += chunks[-1][2]
        admissions = self.admissions(chunks)
        self.num_steps = 1 if chunks else rng.choice((1, 1, 2, 4))
        for job in decoding:
            if job not in paused:
                need = -(-min(len(job.tokens) + self.num_steps - 1, len(job.prompt) + job.limit) // size) - len(job.blocks)
                fresh = self.take(max(0, need))
                job.blocks += fresh
                grown += [(job.row, block) for block in fresh]
                self.sampling.append((job, False))
        for job, begin, length in chunks:
            if begin + length == job.known:
                self.sampling.append((job, True))
        self.sampling.sort(key=lambda entry: entry[0].row)
        plan = StepPlan(
            epoch=self.start.epoch,
            step=self.step,
            num_steps=self.num_steps,
            released=pack_u32(self.released),
            admissions=tuple(admissions),
            grown_rows=pack_u32([row for row, _ in grown]),
            grown_blocks=pack_u32([block for _, block in grown]),
            chunk_rows=pack_u32([job.row for job, _, _ in chunks]),
            chunk_starts=pack_u32([begin for _, begin, _ in chunks]),
            chunk_lengths=pack_u32([length for _, _, length in chunks]),
            paused=pack_u32([job.row for job in paused]),
            copy_from=pack_u32([old for old, *_ in pairs]),
            copy_to=pack_u32([new for _, new, *_ in pairs]),
        )
        for _, target, _, _ in pairs:  # a copy that nobody points at: writes a free block, which must disturb nobody
            self.holders[target] = 0
            self.free.append(target)
        return plan

    def admissions(self, chunks: list[tuple[Job, int, int]]) -> list[Admission]:
        result = []
        for job in self.jobs:
            if job.row >= 0 or job.done or not self.rows or self.rng.random() < 0.4:
                continue
            job.row = self.rows.pop(self.rng.randrange(len(self.rows)))
            prefix = self.shared_prefix(job)
            for block in prefix:
                self.holders[block] += 1
            count = -(-len(job.tokens) // self.start.block_size)
            job.blocks = prefix + self.take(count - len(prefix))
            job.known, cached = len(job.tokens), len(prefix) * self.start.block_size
            length = self.rng.randint(1, job.known - cached)
            chunks.append((job, cached, length))
            job.computed = cached + length
            result.append(
                Admission(
                    row=job.row,
                    tokens=pack_u32(job.tokens),
                    num_prompt_tokens=len(job.prompt),
                    blocks=pack_u32(job.blocks),
                    num_computed_tokens=cached,
                    max_tokens=len(job.prompt) + job.limit,
                    min_tokens=len(job.prompt) + job.minimum,
                    stop_token_ids=pack_u32(job.stops),
                    sampling=SamplingParams(seed=job.seed),
                    sequence=job.sequence,
                )
            )
        self.rng.shuffle(chunks)
        return result

    def apply(self, result: StepResult) -> None:
        tokens = view_u32(result.tokens).reshape(self.num_steps, -1)
        assert tokens.shape[1] == len(self.sampling)
        for k, (row_tokens, row_flags) in enumerate(zip(tokens.tolist(), self.flags(result))):
            for (job, is_chunk), token, flag in zip(self.sampling, row_tokens, row_flags, strict=True):
                ended = job.done or (is_chunk and k > 0)
                assert bool(flag & FLAG_IDLE) == ended
                if not ended:
                    job.output.append(token)
                    assert bool(flag & FLAG_STOP) == (token in job.stops)
                    job.done = bool(flag & FLAG_STOP) or len(job.output) == job.limit

    def flags(self, result: StepResult) -> list[list[int]]:
        width = len(self.sampling)
        return [list(result.flags[k * width : (k + 1) * width]) for k in range(self.num_steps)]


def make_jobs(rng: random.Random, count: int, vocab_size: int, longest: int = 60) -> list[Job]:
    """Jobs whose prompts often share a beginning, with small vocabularies so that stop ids are met."""
    stem = [rng.randrange(vocab_size) for _ in range(longest)]
    jobs = []
    for index in range(count):
        head = stem[: rng.randint(0, longest)] if rng.random() < 0.7 else []
        prompt = head + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))]
        stops = tuple(rng.sample(range(vocab_size), rng.randint(0, 2)))
        limit = rng.randint(1, 40)
        jobs.append(Job(prompt, limit, rng.choice((0, 7, 2**64 - 1)), rng.choice((0, index)), stops, rng.randint(0, limit)))
    return jobs
