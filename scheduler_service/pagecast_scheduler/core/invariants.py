"""Every conservation law of the scheduler, checked from scratch."""

import numpy as np

from pagecast_scheduler.core.request import Status
from pagecast_scheduler.core.scheduler import Scheduler
from pagecast_scheduler.core.state import State


class InvariantError(AssertionError):
    """A law does not hold; the text names it and the first offender."""


def check(scheduler: Scheduler) -> None:
    """Raise InvariantError if anything is inconsistent. Costs O(blocks + rows + requests)."""
    s = scheduler.state
    _require(max(s.applied_step, s.prefilled_in) <= s.step, "a step is remembered that this epoch has not planned")
    _check_blocks(s)
    _check_rows(s)
    _check_requests(s)
    _check_cache(s)


def _require(law: bool, text: str) -> None:
    if not law:
        raise InvariantError(text)


def _check_blocks(s: State) -> None:
    """I1: each block in one state, reference count = holders; idle means none referenced."""
    pool, table = s.kv.pool, s.kv.table
    holders = np.zeros(pool.num_blocks, np.int64)
    holders[0] = 1
    for row in range(s.config.max_num_seqs):
        blocks = table.row(row)
        _require(s.rows.owners[row] is not None or not len(blocks), f"free row {row} holds blocks")
        np.add.at(holders, blocks, 1)
    for entry in s.detached.values():
        np.add.at(holders, entry.blocks, 1)
    for blocks in pool.held():
        np.add.at(holders, blocks, 1)
    wrong = np.flatnonzero(holders != pool.ref_count)
    _require(not len(wrong), f"block {wrong[:1]}: ref_count {pool.ref_count[wrong[:1]]}, holders {holders[wrong[:1]]}")
    clean, cached = pool.free_blocks()
    _require(len(cached) == pool.num_cached, "cached count differs from the ring")
    free = np.concatenate([clean, cached])
    _require(np.array_equal(np.sort(free), np.flatnonzero(pool.ref_count == 0)), "free lists are not the unreferenced blocks")
    _require(bool(pool.has_content[cached].all()) and not pool.has_content[clean].any(), "a free block is in the wrong list")
    if not s.requests:
        held = {block for blocks in pool.held() for block in blocks.tolist()}
        _require(pool.num_referenced == len(held), "idle, but blocks are referenced")


def _check_rows(s: State) -> None:
    rows, size = s.rows, s.config.block_size
    active = [row for row, seq in enumerate(rows.owners) if seq is not None]
    _require(len(active) == rows.num_active and rows.num_free == s.config.max_num_seqs - len(active), "row counts differ")
    for row in active:
        seq = rows.owner(row)
        count, planned = int(rows.num_tokens[row]), int(rows.num_planned[row])
        held = int(s.kv.table.num_blocks[row]) * size
        _require(seq.row == row and seq.status is Status.RUNNING, f"row {row} and its sequence disagree")
        _require(count <= planned <= seq.request.max_tokens, f"row {row}: {count} tokens, {planned} planned of {seq.request.max_tokens}")
        _require(rows.computed(row) <= held, f"row {row}: {rows.computed(row)} tokens planned in {held} slots")
        _require(bool(rows.decoding[row]) != (row in rows.prefilling), f"row {row} is in no phase, or in two")
        steps = bool(rows.decoding[row]) and not seq.request.paused
        _require(bool(rows.stepping[row]) == steps, f"row {row}: stepping flag is wrong")
        _require(not steps or int(rows.capacity[row]) == held, f"row {row}: capacity is not that of its blocks")
        known = seq.num_tokens
        _require(bool((rows.tokens[row, :known] == seq.tokens[:known]).all()), f"row {row}: history changed")
    for row, run in rows.forced.items():
        said = rows.tokens[row, run.start : min(run.end, int(rows.num_tokens[row]))]
        _require(rows.owners[row] is not None and run.start <= rows.num_tokens[row], f"row {row}: forced tokens of nobody")
        _require(bool((said == run.tokens[: len(said)]).all()), f"row {row}: other tokens than the forced ones")
    pending = sum(int(rows.num_planned[row] - rows.num_tokens[row]) for row in active)
    _require(not pending or bool(s.in_flight), "tokens are planned, but nothing is in flight")


def _check_requests(s: State) -> None:
    queued = 0
    for request in s.requests.values():
        open_sequences = [seq for seq in request.sequences if seq.status is not Status.FINISHED]
        _require(len(open_sequences) == request.num_open > 0, f"request {request.key}: open count is wrong")
        for seq in open_sequences:
            homes = (seq.row >= 0) + (seq.detached is not None) + seq.queued + (seq in request.held)
            parked = (request.paused or request.preparing) and seq.status is Status.WAITING
            _require(homes == 1 or (parked and homes == 0), f"request {request.key}: a sequence has {homes} homes")
            queued += seq.queued
    _require(queued == len(s.queue), "queue length differs from its members")
    patient = [seq for request in s.requests.values() if request.is_patient for seq in request.sequences if seq.queued]
    _require(s.queue.backlog.is_of(patient), "the backlog is not of those who wait and are in no hurry")
    waiting = [request for request in s.requests.values() if not request.started]
    _require(len(waiting) == s.num_queued_requests, "queued request count is wrong")
    _require(sum(r.num_prompt_tokens for r in waiting) == s.num_queued_tokens, "queued token count is wrong")
    _require(s.tenants.num_open() == len(s.requests), "tenants' open requests are wrong")


def _check_cache(s: State) -> None:
    """I4 and the cache's agreement with the pool; entries of blocks in use hold the very tokens of their rows."""
    pool, entries, size = s.kv.pool, s.kv.cache.entries(), s.config.block_size
    _require(set(entries) == set(np.flatnonzero(pool.has_content).tolist()), "cache entries are not the blocks with content")
    for seq in s.rows.running():
        blocks = s.kv.table.row(seq.row)
        full = min(seq.num_tokens // size, len(blocks))
        if not full or seq.request.submit.bypass_prefix_cache:
            continue
        seq.chain.extend(seq.tokens, full)
        for index in range(full):
            entry = entries.get(int(blocks[index]))
            _require(entry is None or entry[0] == seq.chain.digests[index], f"row {seq.row}: block {index} is cached as something else")
