"""What happens in one simulated run, all drawn from one seed before it starts.

Each feature (faults, lossy link, deadlines, pauses ...) is switched on by its own coin, so that seeds differ in kind and not only in
numbers; sizes are tiny, so that edges of blocks, chunks, limits and queues are met all the time.
"""

from dataclasses import dataclass, field, replace
from random import Random

from sim.reference import VOCABULARY, stream

from pagecast_scheduler.core.config import SchedulerConfig
from pagecast_wire.codec import pack_u32
from pagecast_wire.intake import KEY_BITS, Priority, Submit
from pagecast_wire.sampling import Constraint, ConstraintKind, SamplingParams, StopRules

STEP_US = 1000
"""Nominal device time of a step; every other time is drawn around it."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request and what its client will do. Times are microseconds after arrival; -1 is never."""

    key: int
    arrival_us: int
    prompt: tuple[int, ...]
    seed: int  # unique: names the request in the worker
    namespace: int
    tenant: str
    priority: int
    num_sequences: int
    max_output_tokens: int
    min_output_tokens: int
    stop_ids: frozenset[int]
    bypass_prefix_cache: bool = False
    deadline_ms: int = -1
    time_budget_ms: int = -1
    max_queue_ms: int = -1
    cancel_us: int = -1
    cancel_after_tokens: int = -1
    stop_at: tuple[int, int] | None = None  # (sequence, keep)
    pauses: tuple[tuple[int, int], ...] = ()  # (from, until)
    broken_output: int = -1  # output index of sequence 0 whose logits are NaN
    poison_output: int = -1  # output index whose computation kills the worker group
    dead_output: int = -1  # output index of sequence 0 at which the rules leave no token
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    constraint: str = ""  # of the regex kind; one that begins with "bad" does not compile

    @property
    def slot(self) -> int:
        return self.key >> KEY_BITS

    @property
    def sampling(self) -> SamplingParams:
        constraint = Constraint(ConstraintKind.REGEX, self.constraint) if self.constraint else None
        return SamplingParams(
            seed=self.seed, num_logprobs=self.num_logprobs, num_prompt_logprobs=self.num_prompt_logprobs, constraint=constraint
        )  # fmt: skip

    def submit(self, history: tuple[bytes, ...] = (), elapsed_ms: int = 0) -> Submit:
        """The wire message; `elapsed_ms` shortens the relative times of a request that is brought back."""

        def left(limit_ms: int) -> int:
            return -1 if limit_ms < 0 else max(limit_ms - elapsed_ms, 0)

        return Submit(
            key=self.key, prompt=pack_u32(self.prompt), sampling=self.sampling,
            stop=StopRules(
                max_output_tokens=self.max_output_tokens, min_output_tokens=self.min_output_tokens,
                stop_token_ids=pack_u32(sorted(self.stop_ids)),
            ),
            cache_namespace=bytes([self.namespace]) * 32, tenant=self.tenant, num_sequences=self.num_sequences, history=history,
            priority=self.priority, deadline_ms=left(self.deadline_ms), time_budget_ms=left(self.time_budget_ms),
            max_queue_ms=left(self.max_queue_ms), bypass_prefix_cache=self.bypass_prefix_cache,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole run."""

    seed: int
    config: SchedulerConfig
    requests: tuple[RequestPlan, ...]
    latency_us: int
    jitter_us: int
    loss: float
    duplication: float
    late_results: float
    kills_us: tuple[int, ...] = ()
    restarts_us: tuple[int, ...] = ()
    lost_slot_us: tuple[tuple[int, int], ...] = ()  # (front end slot, when it vanishes)
    transfers_us: tuple[int, ...] = ()
    slow_steps: float = 0.0
    features: frozenset[str] = field(default_factory=frozenset)


FEATURES = {
    "tight": 0.5, "prefixes": 0.6, "lossy": 0.35, "kills": 0.3, "restarts": 0.15, "cancels": 0.35, "stop_at": 0.25, "pauses": 0.25,
    "deadlines": 0.2, "broken": 0.2, "poison": 0.08, "sequences": 0.35, "tenants": 0.4, "classes": 0.35, "multi_step": 0.3,
    "no_cache": 0.08, "small_queue": 0.12, "lost_frontend": 0.08, "batch_delay": 0.1, "no_recovery": 0.06, "long": 0.2,
    "transfers": 0.15, "chat": 0.25,
}  # fmt: skip
"""Chance of each feature in a seed."""

BATCHES = "batches"
"""A feature drawn apart from the others: most requests, or all, are of class BATCH and of many lengths."""


def draw(seed: int) -> Scenario:
    """The scenario of one seed."""
    random = Random(seed * 0x9E3779B1 + 7)
    on = frozenset(name for name, chance in FEATURES.items() if random.random() < chance)
    config = with_step_sizes(_draw_config(random, on), Random(seed * 0x2545F491 + 5))
    count = random.randint(3, 12)
    bases = [[random.randrange(random.choice((2, VOCABULARY))) for _ in range(40)] for _ in range(random.randint(1, 3))]
    gap = random.choice((0, STEP_US, 4 * STEP_US)) if "tight" not in on else random.choice((0, STEP_US // 2))
    requests: list[RequestPlan] = []
    arrival = 0
    for index in range(count):
        prompt = _draw_turn(random, config, requests) if "chat" in on and requests and random.random() < 0.4 else ()
        requests.append(_draw_request(random, on, config, prompt or _draw_prompt(random, on, config, bases), index, arrival))
        arrival += random.randint(0, gap) if random.random() < 0.85 else random.randint(0, 20 * STEP_US)
    end = arrival + 25 * STEP_US
    times = lambda most: tuple(sorted(random.randrange(end) for _ in range(random.randint(1, most))))
    lossy = "lossy" in on
    # A turn of a chat repeats an earlier answer as it is without rules.
    batches = Random(seed * 0x6C8E9CF5 + 1)
    if "chat" not in on and batches.random() < 0.35:
        on |= {BATCHES}
        requests = with_batches(requests, config, batches)
        config = replace(config, arrival_gap_us=batches.choice((0, STEP_US // 2, 2 * STEP_US)))
    ruled = tuple(requests) if "chat" in on else with_output_rules(tuple(requests), Random(seed * 0x51ED27 + 3))
    return Scenario(
        seed=seed, config=config, requests=ruled, latency_us=random.choice((20, 100, 900)),
        jitter_us=random.choice((500, 3000)) if lossy else 0, loss=random.uniform(0, 0.2) if lossy else 0.0,
        duplication=random.uniform(0, 0.3) if lossy else 0.0, late_results=0.2 if "kills" in on or "restarts" in on or lossy else 0.0,
        kills_us=times(3) if "kills" in on else (), restarts_us=times(2) if "restarts" in on else (),
        lost_slot_us=((random.randrange(2), random.randrange(end)),) if "lost_frontend" in on else (),
        transfers_us=times(4) if "transfers" in on else (), slow_steps=random.choice((0.0, 0.1)), features=on,
    )  # fmt: skip


def with_step_sizes(config: SchedulerConfig, random: Random) -> SchedulerConfig:
    """Sizes that steps had better fill, for half of the seeds, drawn apart from everything else."""
    sizes = random.sample(range(2, config.max_num_batched_tokens + 1), min(random.choice((0, 0, 2, 5)), config.max_num_batched_tokens - 1))
    return replace(config, step_sizes=tuple(sorted(sizes)))


def with_batches(requests: list[RequestPlan], config: SchedulerConfig, random: Random) -> list[RequestPlan]:
    """All of them, or three of four, are of class BATCH, and their limits differ as much as there is room."""
    share = random.choice((0.75, 1))
    changed = []
    for plan in requests:
        room = min(config.max_model_len, config.pool_tokens) - len(plan.prompt)
        most = max(plan.max_output_tokens, random.randint(1, max(1, room)))
        changed.append(replace(plan, priority=Priority.BATCH, max_output_tokens=most) if random.random() < share else plan)
    return changed


def with_output_rules(requests: tuple[RequestPlan, ...], random: Random) -> tuple[RequestPlan, ...]:
    """Log-probabilities, constraints and dead ends for some, drawn apart from everything else. A third of the seeds has none."""
    if random.random() < 0.33:
        return requests
    texts = [f"{random.choice(('good', 'good', 'good', 'bad'))} {index}" for index in range(3)]
    return tuple(
        replace(
            plan, num_logprobs=random.choice((-1, -1, 0, 2)), num_prompt_logprobs=random.choice((-1, -1, -1, 0, 2)),
            constraint=random.choice(texts) if random.random() < 0.3 else "",
            dead_output=random.randrange(plan.max_output_tokens) if random.random() < 0.08 else -1,
        )
        for plan in requests
    )  # fmt: skip


def _draw_config(random: Random, on: frozenset[str]) -> SchedulerConfig:
    block_size = random.choice((1, 2, 4, 4, 8, 16)) if "tight" in on else random.choice((2, 4, 8, 16))
    max_model_len = random.randint(16, 64)
    longest = -(-max_model_len // block_size)
    num_blocks = 1 + (random.randint(max(longest // 2, 3), longest + 2) if "tight" in on else random.randint(longest, 4 * longest + 8))
    max_num_seqs = random.randint(1, 8) if "tight" not in on else random.randint(3, 8)
    return SchedulerConfig(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice((0, random.randint(1, 16), 64)),
        max_queued_requests=random.randint(1, 4) if "small_queue" in on else 64,
        max_queued_tokens=random.randint(20, 120) if "small_queue" in on else 100_000,
        enable_prefix_caching="no_cache" not in on,
        batch_delay_us=random.choice((500, 5000)) if "batch_delay" in on else 0,
        max_plans_in_flight=random.choice((1, 2, 2, 3)),
        max_steps_per_plan=random.choice((0, 2, 3, 4)) if "multi_step" in on else 1,
        table_checksums=random.random() < 0.3,
        ageing_us=random.choice((5 * STEP_US, 10_000 * STEP_US)),
        max_head_passes=random.choice((0, 1, 4, 16)),
        max_recoveries=random.choice((0, 1)) if "no_recovery" in on else 16,
    )  # fmt: skip


def _draw_prompt(random: Random, on: frozenset[str], config: SchedulerConfig, bases: list[list[int]]) -> tuple[int, ...]:
    """Mostly a piece of a shared base, cut at or beside a block's edge, with a tail of its own."""
    longest = config.max_model_len - 1
    size = config.block_size
    if "long" in on and random.random() < 0.3:
        length = random.randint(longest // 2, longest)
    else:
        length = random.choice((random.randint(1, 6), random.randint(1, 20), size * random.randint(1, 3) + random.randint(-1, 1)))
    length = min(max(length, 1), longest)
    tail = [random.randrange(VOCABULARY) for _ in range(length)]
    if "prefixes" not in on:
        return tuple(tail)
    base = random.choice(bases)
    shared = min(length, len(base), random.choice((length, size * random.randint(0, 4), random.randint(0, length))))
    return tuple(base[:shared] + tail[shared:])


def _draw_turn(random: Random, config: SchedulerConfig, earlier: list[RequestPlan]) -> tuple[int, ...]:
    """The next turn of a chat: an earlier prompt, its answer (as the reference knows it), and a few tokens more."""
    last = random.choice(earlier)
    answer = stream(list(last.prompt), last.seed, 0, last.max_output_tokens, last.min_output_tokens, last.stop_ids).tokens
    more = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 5))]
    return (*last.prompt, *answer, *more)[: config.max_model_len - 1]


def _draw_request(
    random: Random, on: frozenset[str], config: SchedulerConfig, prompt: tuple[int, ...], index: int, arrival: int
) -> RequestPlan:
    chance = lambda feature, likely: feature in on and random.random() < likely
    room = min(config.max_model_len, config.pool_tokens) - len(prompt)
    usual = random.choice((1, 2, random.randint(1, 8), random.randint(4, 24))) if "tight" not in on else random.randint(2, 32)
    output = max(1, min(room, usual))
    if random.random() < 0.03:
        output = room + random.randint(0, 3) if room > 0 else 1  # at, or just beyond, what can fit
        output = max(output, 1)
    sequences = random.randint(2, 4) if chance("sequences", 0.5) else 1
    around = lambda most: random.randint(0, most * STEP_US)
    pauses: list[tuple[int, int]] = []
    if chance("pauses", 0.5):
        start = around(12)
        pauses.append((start, start + around(10) + 1))
    deadlines = chance("deadlines", 0.5)
    return RequestPlan(
        key=(random.randrange(2) << KEY_BITS) | (index + 1), arrival_us=arrival, prompt=prompt, seed=index * 7919 + 11,
        namespace=random.randrange(2 if random.random() < 0.3 else 1), tenant=random.choice("abc") if "tenants" in on else "a",
        priority=random.choice(tuple(Priority)) if "classes" in on else Priority.NORMAL, num_sequences=sequences, max_output_tokens=output,
        min_output_tokens=random.randint(0, output) if random.random() < 0.3 else 0,
        stop_ids=frozenset(random.sample(range(VOCABULARY), random.choice((0, 1, 3)))), bypass_prefix_cache=random.random() < 0.06,
        deadline_ms=random.randint(1, 60) if deadlines and random.random() < 0.4 else -1,
        time_budget_ms=random.randint(1, 40) if deadlines and random.random() < 0.4 else -1,
        max_queue_ms=random.randint(0, 20) if deadlines and random.random() < 0.4 else -1,
        cancel_us=around(25) if chance("cancels", 0.3) else -1,
        cancel_after_tokens=random.randint(0, output) if chance("cancels", 0.3) else -1,
        stop_at=(random.randrange(sequences), random.randint(0, output)) if chance("stop_at", 0.5) else None, pauses=tuple(pauses),
        broken_output=random.randrange(output) if chance("broken", 0.4) else -1,
        poison_output=random.randrange(output) if chance("poison", 0.3) else -1,
    )  # fmt: skip
