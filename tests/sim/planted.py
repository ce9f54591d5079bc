"""Small mutations of the scheduler core, each a bug somebody could write. The simulator must find every one of them.

A mutation gets a `Patch` and replaces functions of the core in this process; leaving the `planted` context puts the originals back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from pagecast_scheduler.core import applying, intake, planning, policy, prefilling, recovery
from pagecast_scheduler.core import scheduler as door
from pagecast_scheduler.core.block_pool import BlockPool
from pagecast_scheduler.core.kv_manager import KvManager
from pagecast_scheduler.core.plan_builder import PlanDraft
from pagecast_scheduler.core.prefix_cache import HashChain, PrefixCache
from pagecast_scheduler.core.request import Status
from pagecast_scheduler.core.rows import Rows
from pagecast_scheduler.core.state import State
from pagecast_scheduler.core.tenants import Tenants
from pagecast_scheduler.core.timers import Timers
from pagecast_wire.sampling import FinishReason

Patch = Callable[[Any, str, Any], None]
"""(owner, name, replacement)"""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug. apply replaces what it must through the patch."""

    name: str
    apply: Callable[[Patch], None]


MUTATIONS: list[Mutation] = []


def mutation(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Put the function into the list; its docstring says what is wrong."""
    MUTATIONS.append(Mutation(apply.__name__, apply))
    return apply


@contextmanager
def planted(apply: Callable[[Patch], None]) -> Iterator[None]:
    """The core with one bug in it."""
    with ExitStack() as stack:
        apply(lambda owner, name, replacement: stack.enter_context(mock.patch.object(owner, name, replacement)))
        yield


# Blocks ----------------------------------------------------------------------------------------------------------------


@mutation
def missed_decref(patch: Patch) -> None:
    """The last block of a sequence that leaves keeps its holder."""
    original = BlockPool.give_back
    patch(BlockPool, "give_back", lambda self, blocks: original(self, blocks[:-1]))


@mutation
def double_free(patch: Patch) -> None:
    """A block that another sequence shares goes free with its first holder."""
    original = BlockPool.give_back

    def give_back(self: BlockPool, blocks: Any) -> None:
        self.ref_count[blocks] = np.minimum(self.ref_count[blocks], 1)
        original(self, blocks)

    patch(BlockPool, "give_back", give_back)


@mutation
def off_by_one_at_a_block_edge(patch: Patch) -> None:
    """A length that fills its blocks exactly gets one block less."""
    patch(KvManager, "blocks_for", lambda self, num_tokens: max(1, -(-(num_tokens - 1) // self.block_size)))


@mutation
def decode_grows_one_token_late(patch: Patch) -> None:
    """A decoding row believes that its last block holds one token more."""
    original = Rows.start_decoding
    patch(Rows, "start_decoding", lambda self, row, capacity: original(self, row, capacity + 1))


@mutation
def held_block_reused_early(patch: Patch) -> None:
    """A hold ends one step before what it waits for."""
    original = BlockPool.end_holds
    patch(BlockPool, "end_holds", lambda self, step: original(self, step + 1))


@mutation
def cancel_keeps_blocks(patch: Patch) -> None:
    """Cancelled sequences leave their row and keep their blocks."""
    original = State.finish

    def finish(self: State, seq: Any, reason: FinishReason, *rest: Any, **named: Any) -> None:
        if reason is FinishReason.CANCELLED:
            with mock.patch.object(KvManager, "leave", lambda kv, *left: None):
                original(self, seq, reason, *rest, **named)
        else:
            original(self, seq, reason, *rest, **named)

    patch(State, "finish", finish)


@mutation
def admission_over_commits(patch: Patch) -> None:
    """A sequence is admitted whether or not its blocks are there."""
    patch(policy, "admission_fits", lambda needed, num_free, num_reserved, num_active: True)


@mutation
def evicted_block_stays_findable(patch: Patch) -> None:
    """A cached block is taken for something else, and the prefix cache is not told."""

    def take(self: KvManager, count: int) -> Any:
        blocks, _ = self.pool.take(count)
        return blocks

    patch(KvManager, "_take", take)


# Prefix cache ----------------------------------------------------------------------------------------------------------


@mutation
def hash_without_its_parent(patch: Patch) -> None:
    """A block's digest covers its own tokens only."""
    original = HashChain.extend

    def extend(self: HashChain, tokens: Any, num_blocks: int) -> None:
        original(self, tokens, num_blocks)
        self.digests[:] = [sha256(self.seed + piece).digest() for piece in self.pieces]

    patch(HashChain, "extend", extend)


@mutation
def namespace_left_out_of_the_seed(patch: Patch) -> None:
    """Everybody shares one namespace."""
    original = HashChain.__init__
    patch(HashChain, "__init__", lambda self, namespace, block_size: original(self, b"", block_size))


class CollidingChain(HashChain):
    """Digests collide for blocks that differ in their last token only; the chain behind them is right."""

    __slots__ = ("_parents",)

    def __init__(self, namespace: bytes, block_size: int) -> None:
        super().__init__(namespace, block_size)
        self._parents = [self.seed]

    def extend(self, tokens: Any, num_blocks: int) -> None:
        width = self._block_size
        for index in range(len(self.digests), num_blocks):
            piece = tokens[index * width : (index + 1) * width].astype("<u4").tobytes()
            self.digests.append(sha256(self._parents[-1] + piece[:-4]).digest())
            self._parents.append(sha256(self._parents[-1] + piece).digest())
            self.pieces.append(piece)


def colliding_digests(patch: Patch) -> None:
    """Not a bug: a hash with collisions, which the comparison of token ids must make harmless."""
    patch(intake, "HashChain", CollidingChain)


@mutation
def token_ids_not_compared(patch: Patch) -> None:
    """With colliding digests, a hit is believed without looking at its tokens."""
    colliding_digests(patch)

    def lookup(self: PrefixCache, chain: HashChain, tokens: Any, max_blocks: int) -> list[int]:
        chain.extend(tokens, max_blocks)
        hits: list[int] = []
        for digest in chain.digests[:max_blocks]:
            if digest not in self._blocks:
                break
            hits.append(self._blocks[digest])
        return hits

    patch(PrefixCache, "lookup", lookup)


@mutation
def hit_covers_the_whole_prompt(patch: Patch) -> None:
    """A prompt that is cached to its last token leaves nothing to compute."""
    original = KvManager.lookup
    patch(KvManager, "lookup", lambda self, chain, tokens, num_tokens: original(self, chain, tokens, num_tokens + 1))


@mutation
def provisional_entry_kept_after_a_failed_step(patch: Patch) -> None:
    """After the workers were lost the cache still finds what the lost steps were to compute."""
    original = recovery.fail_epoch

    def fail_epoch(s: State, *args: Any) -> None:
        lost = dict(s.kv.cache.entries())
        original(s, *args)
        pool = s.kv.pool
        blocks, _ = pool.take(pool.num_free)
        chain = HashChain(bytes(32), s.config.block_size)
        chain.digests, chain.pieces = [digest for digest, _ in lost.values()], [piece for _, piece in lost.values()]
        pool.set_content(np.array(s.kv.cache.register(chain, list(range(len(lost))), list(lost), 0), np.int64))
        pool.give_back(blocks)

    patch(recovery, "fail_epoch", fail_epoch)


@mutation
def broken_row_keeps_its_entries(patch: Patch) -> None:
    """What a row with NaN wrote can still be found."""
    patch(KvManager, "forget", lambda self, blocks: None)


@mutation
def bypass_is_ignored(patch: Patch) -> None:
    """A request that asked for no cache hits is given some."""
    original = prefilling._shared

    def shared(s: State, seq: Any) -> Any:
        if s.kv.caching:
            return s.kv.lookup(seq.chain, seq.tokens, seq.num_tokens)
        return original(s, seq)

    patch(prefilling, "_shared", shared)


@mutation
def partial_block_shared_without_a_copy(patch: Patch) -> None:
    """A sibling is given the block that the end of the prompt fills in part and the other's own output fills up."""
    original = prefilling._shared

    def shared(s: State, seq: Any) -> Any:
        hits = original(s, seq)
        reach = (len(hits) + 1) * s.config.block_size
        for sibling in seq.request.sequences:
            if sibling is not seq and sibling.row >= 0 and s.rows.decoding[sibling.row] and seq.num_tokens > reach:
                return s.kv.table.row(sibling.row)[: len(hits) + 1]
        return hits

    patch(prefilling, "_shared", shared)


@mutation
def newest_token_counts_as_computed(patch: Patch) -> None:
    """A sequence that leaves its row publishes the block that its last token fills, whose KV no step has written."""
    patch(State, "_certain", lambda self, row: int(self.rows.num_tokens[row]) if self.rows.decoding[row] else 0)


# Steps and results -----------------------------------------------------------------------------------------------------


@mutation
def stale_result_applied(patch: Patch) -> None:
    """A row's generation does not change, so late tokens of its old sequence are given to the new one."""
    original = Rows.close

    def close(self: Rows, row: int) -> None:
        original(self, row)
        self.generation[row] -= 1

    patch(Rows, "close", close)


@mutation
def epoch_not_checked(patch: Patch) -> None:
    """A result of a lost epoch passes for one of the present epoch."""
    original = applying.apply_result

    def apply_result(s: State, result: Any, now: int) -> None:
        original(s, msgspec.structs.replace(result, epoch=s.epoch), now)

    patch(applying, "apply_result", apply_result)


@mutation
def duplicate_result_applied(patch: Patch) -> None:
    """Whatever result comes is taken for the oldest plan in flight."""
    original = applying.apply_result

    def apply_result(s: State, result: Any, now: int) -> None:
        step = s.in_flight[0].step if s.in_flight else result.step
        original(s, msgspec.structs.replace(result, step=step), now)

    patch(applying, "apply_result", apply_result)


@mutation
def length_stop_off_by_one(patch: Patch) -> None:
    """A sequence may produce one token more than asked for."""
    original = intake.build

    def build(s: State, submit: Any, now: int) -> Any:
        request = original(s, submit, now)
        request.max_tokens = min(request.max_tokens + 1, s.config.max_model_len)
        return request

    patch(intake, "build", build)


@mutation
def preemption_keeps_placeholders(patch: Patch) -> None:
    """A preempted sequence takes tokens that were planned, but are not known yet, for its history."""
    original = State.preempt

    def preempt(self: State, seq: Any, *rest: Any, **named: Any) -> None:
        self.rows.num_tokens[seq.row] = self.rows.num_planned[seq.row]
        original(self, seq, *rest, **named)

    patch(State, "preempt", preempt)


@mutation
def released_row_not_named(patch: Patch) -> None:
    """A plan leaves out the last of the rows that were let go."""
    original = PlanDraft.build
    patch(PlanDraft, "build", lambda self, epoch, step, released, *rest: original(self, epoch, step, released[:-1], *rest))


@mutation
def paused_rows_decode(patch: Patch) -> None:
    """Pausing a request does not keep its rows from stepping."""
    patch(Rows, "set_paused", lambda self, row, paused, capacity: None)


@mutation
def chunk_ignores_the_budget(patch: Patch) -> None:
    """A long prompt is prefilled in one step, whatever max_num_batched_tokens says."""
    patch(policy, "chunk_length", lambda remaining, budget, room: max(0, min(remaining, room)))


@mutation
def plans_too_far_ahead(patch: Patch) -> None:
    """One plan more than allowed is in flight."""
    original = door.Scheduler.plan_step

    def plan_step(self: door.Scheduler, now: int) -> Any:
        config = self.state.config
        return planning.make_plan(self.state, now) if len(self.state.in_flight) == config.max_plans_in_flight else original(self, now)

    patch(door.Scheduler, "plan_step", plan_step)


# Fairness, victims, limits ---------------------------------------------------------------------------------------------


@mutation
def fairness_counter_not_lifted(patch: Patch) -> None:
    """A tenant that was away comes back with the credit of its absence."""
    original = Tenants.enter

    def enter(self: Tenants, name: str) -> int:
        known = self._index.get(name, -1)
        before = int(self.served[known]) if known >= 0 else 0
        index = original(self, name)
        if self._open[index] == 1:
            self.served[index] = before
        return index

    patch(Tenants, "enter", enter)


@mutation
def victim_is_the_oldest(patch: Patch) -> None:
    """The sequence that has waited and worked longest is preempted first."""

    def choose_victim(candidates: list[policy.Running], requester: policy.Running) -> policy.Running | None:
        eligible = [c for c in candidates if c.row != requester.row and not c.protected and c.urgency >= requester.urgency]
        return min(eligible, key=lambda c: c.order, default=None)

    patch(policy, "choose_victim", choose_victim)


@mutation
def higher_class_preempted_for_a_lower(patch: Patch) -> None:
    """Victim choice does not look at the class."""
    original = policy.choose_victim

    def choose_victim(candidates: list[policy.Running], requester: policy.Running) -> policy.Running | None:
        level = [policy.Running(c.row, 0, c.order, c.lost_tokens, c.paused, c.protected) for c in candidates]
        chosen = original(level, next(c for c in level if c.row == requester.row))
        return None if chosen is None else next(c for c in candidates if c.row == chosen.row)

    patch(policy, "choose_victim", choose_victim)


@mutation
def deadlines_forgotten(patch: Patch) -> None:
    """Nobody ends when its time has run out."""
    patch(Timers, "take_due", lambda self, now: [])


@mutation
def history_forgotten(patch: Patch) -> None:
    """A request that is brought back after a scheduler was lost starts from its prompt."""
    original = intake.build
    patch(intake, "build", lambda s, submit, now: original(s, msgspec.structs.replace(submit, history=()), now))


@mutation
def cancel_forgets_siblings(patch: Patch) -> None:
    """Only the first open sequence of a cancelled request ends."""
    original = door.Scheduler._end

    def end(self: door.Scheduler, request: Any, reason: FinishReason, now: int) -> None:
        if reason is not FinishReason.CANCELLED:
            original(self, request, reason, now)
            return
        seq = next(seq for seq in request.sequences if seq.status is not Status.FINISHED)
        self.state.finish(seq, reason, now)

    patch(door.Scheduler, "_end", end)


@mutation
def stop_text_keeps_everything(patch: Patch) -> None:
    """Usage counts tokens behind a stop text."""
    original = State.finish

    def finish(self: State, seq: Any, reason: FinishReason, now: int, keep: int | None = None, stop_token_id: int = -1) -> None:
        original(self, seq, reason, now, None, stop_token_id)

    patch(State, "finish", finish)


@mutation
def siblings_never_released(patch: Patch) -> None:
    """The other sequences of a request wait for ever."""
    patch(State, "release_held", lambda self, request, now: None)


@mutation
def minimum_forgotten_in_admissions(patch: Patch) -> None:
    """The worker is not told before which length no stop id may be sampled."""
    original = prefilling.admission
    patch(prefilling, "admission", lambda *a: msgspec.structs.replace(original(*a), min_tokens=0))
