"""Given these events, expect these plans and outputs."""

import pytest
from core.cluster import Cluster, key_of

from pagecast_scheduler.core import policy
from pagecast_wire.codec import encode, view_u32
from pagecast_wire.intake import Phase
from pagecast_wire.result import FLAG_BAD, StepResult
from pagecast_wire.sampling import FinishReason

PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]  # two full blocks of four, and two tokens more


def columns(plan, *names):
    return [view_u32(getattr(plan, name)).tolist() for name in names]


def chunks(plan):
    return list(zip(*columns(plan, "chunk_rows", "chunk_starts", "chunk_lengths"), strict=True))


def other_prompt(seed, length=10):
    return [(seed >> bit % 8) & 1 for bit in range(length)]


def test_a_request_from_admission_to_its_length():
    cluster = Cluster(max_plans_in_flight=1)
    assert cluster.submit(1, PROMPT, 3).queue_position == 0
    plan = cluster.plan()
    (entry,) = plan.admissions
    assert (plan.epoch, plan.step, entry.row, entry.max_tokens, entry.num_computed_tokens) == (1, 1, 0, 13, 0)
    assert view_u32(entry.tokens).tolist() == PROMPT and len(view_u32(entry.blocks)) == 3 and chunks(plan) == [(0, 0, 10)]
    cluster.apply()
    assert cluster.plan().chunk_rows == b""  # the step's token 11 fits the third block
    cluster.apply()
    cluster.plan()
    cluster.apply()
    stream = cluster.streams[1, 0]
    assert stream.reason is FinishReason.LENGTH and len(stream.tokens) == 3
    assert cluster.plan() is None


def test_a_steady_decode_plan_is_empty_and_small():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 20)
    cluster.step()
    plan = cluster.plan()
    assert (plan.admissions, plan.released, plan.grown_rows, plan.chunk_rows, plan.paused) == ((), b"", b"", b"", b"")
    assert len(encode(plan)) < 80


def test_blocks_grow_exactly_when_a_token_needs_one():
    cluster = Cluster(max_plans_in_flight=1)
    cluster.submit(1, PROMPT, 20)
    grown = []
    for _ in range(10):
        plan = cluster.plan()
        grown.append(len(view_u32(plan.grown_rows)))
        cluster.apply()
    # Step n > 1 feeds token 9 + n (counted from 1): 13 and 17 need the fourth and fifth block.
    assert grown == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_a_row_at_its_limit_is_never_overrun_and_its_row_is_free_in_the_next_plan():
    cluster = Cluster(max_num_seqs=1, max_plans_in_flight=3)
    cluster.submit(1, PROMPT, 2)
    cluster.submit(2, other_prompt(77), 2)
    first, second, third = cluster.plan(), cluster.plan(), cluster.plan()
    assert first.admissions and not second.admissions
    assert columns(third, "released") == [[0]] and third.admissions[0].row == 0
    assert cluster.worker.num_samples == 3
    cluster.run()
    assert cluster.worker.num_samples == 4


def test_a_stop_token_costs_one_wasted_step_and_its_late_result_is_ignored():
    cluster = Cluster(max_plans_in_flight=2)
    cluster.submit(1, PROMPT, 40, stops=(1,), seed=3)
    cluster.run()
    stream = cluster.streams[1, 0]
    assert stream.reason is FinishReason.STOP and stream.finished.stop_token_id == 1
    assert cluster.worker.num_samples <= len(stream.tokens) + 1


def test_min_output_tokens_keep_the_stop_ids_away():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 12, stops=(0, 1), min_output=5)
    cluster.run()
    assert len(cluster.streams[1, 0].tokens) == 6


def test_a_long_prompt_goes_in_chunks_beside_the_decodes():
    cluster = Cluster(max_num_batched_tokens=8, max_num_seqs=2)
    cluster.submit(1, [1, 0], 30)
    cluster.step()
    cluster.submit(2, other_prompt(90, 20), 4)
    seen = []
    for _ in range(3):
        seen += chunks(cluster.plan())
        cluster.apply()
    assert seen == [(1, 0, 7), (1, 7, 7), (1, 14, 6)]
    assert len(cluster.streams[1, 0].tokens) == 4  # not a single step missed
    cluster.run()


def test_requests_that_arrive_together_share_a_prefix():
    cluster = Cluster()
    for key in (1, 2, 3):
        cluster.submit(key, [*PROMPT, key & 1], 2)
    plan = cluster.plan()
    blocks = [view_u32(entry.blocks).tolist() for entry in plan.admissions]
    assert [entry.num_computed_tokens for entry in plan.admissions] == [0, 8, 8]
    assert blocks[0][:2] == blocks[1][:2] == blocks[2][:2] and len({table[2] for table in blocks}) == 3
    cluster.run()
    assert cluster.scheduler.stats().prefix_tokens_hit == 16


@pytest.mark.parametrize(("length", "hit"), [(8, 4), (9, 8), (4, 0), (5, 4)])
def test_a_hit_leaves_the_last_prompt_token(length, hit):
    cluster = Cluster()
    for key in (1, 2):
        cluster.submit(key, PROMPT[:length], 1)
        cluster.run()
    assert cluster.streams[2, 0].finished.usage.cached_tokens == hit


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("stops", [(), (1,)])
def test_the_next_turn_of_a_chat_finds_prompt_and_answer(in_flight, stops):
    cluster = Cluster(max_plans_in_flight=in_flight)
    cluster.submit(1, PROMPT, 7, stops=stops, min_output=6)
    cluster.run()
    answer = cluster.streams[1, 0].tokens
    turn = [*PROMPT, *answer, 1, 0]
    cluster.submit(2, turn, 1)
    cluster.run()
    # KV of the last token was never written, so it does not count.
    assert cluster.streams[2, 0].finished.usage.cached_tokens == (len(PROMPT) + len(answer) - 1) // 4 * 4


def test_namespaces_and_bypass_share_nothing():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 1)
    cluster.run()
    cluster.submit(2, PROMPT, 1, cache_namespace=b"y" * 32)
    cluster.submit(3, PROMPT, 1, bypass_prefix_cache=True)
    cluster.run()
    assert [cluster.streams[key, 0].finished.usage.cached_tokens for key in (2, 3)] == [0, 0]


@pytest.mark.parametrize("values", [{}, {"bypass_prefix_cache": True}])
def test_sequences_of_one_request_prefill_the_prompt_once(values):
    cluster = Cluster()
    cluster.submit(1, PROMPT, 6, num_sequences=3, **values)
    cluster.run()
    prefilled = sum(length for plan in cluster.plans for _, _, length in chunks(plan))
    assert prefilled == 10 + 2 + 2  # the siblings recompute the partial block only
    assert len({tuple(cluster.streams[1, index].tokens) for index in range(3)}) > 1


def test_preemption_takes_the_least_lost_work_and_loses_no_token():
    cluster = Cluster(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=24)
    for key, length in ((1, 8), (2, 7), (3, 3)):
        cluster.submit(key, other_prompt(key * 37, length), 10)
    cluster.run()
    usages = [cluster.streams[key, 0].finished.usage for key in (1, 2, 3)]
    assert usages[0].num_preemptions == 0, "the oldest was preempted"
    assert usages[2].num_preemptions >= 1 and usages[2].recomputed_tokens > 0
    assert cluster.scheduler.stats().num_preemptions == sum(usage.num_preemptions for usage in usages)


def test_an_abort_frees_the_blocks_before_the_next_plan():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 20)
    cluster.submit(2, other_prompt(1), 20)
    cluster.plan()
    cluster.plan()
    cluster.scheduler.abort(1, cluster.now)
    cluster.check()
    assert cluster.streams[1, 0].reason is FinishReason.CANCELLED
    assert cluster.scheduler.stats().num_blocks_referenced == 3
    cluster.run()
    assert cluster.streams[2, 0].reason is FinishReason.LENGTH
    assert 0 in columns(cluster.plans[2], "released")[0]


def test_a_paused_row_sits_out_and_keeps_its_blocks():
    cluster = Cluster(max_plans_in_flight=1)
    cluster.submit(1, PROMPT, 20)
    cluster.submit(2, other_prompt(5), 20)
    cluster.step()
    cluster.scheduler.pause(1, True, cluster.now)
    blocks = cluster.state.kv.table.row(0).tolist()
    plan = cluster.plan()
    assert columns(plan, "paused") == [[0]]
    cluster.apply()
    assert len(cluster.streams[1, 0].tokens) == 1 and cluster.state.kv.table.row(0).tolist() == blocks
    assert cluster.progress[1][-1].phase is Phase.PAUSED_SLOW_CONSUMER
    cluster.scheduler.pause(1, False, cluster.now)
    assert columns(cluster.plan(), "paused") == [[]]
    cluster.run()


def test_a_stop_text_keeps_what_the_front_end_says():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 20)
    for _ in range(6):
        cluster.step()
    stream = cluster.streams[1, 0]
    stream.keep = 2
    cluster.scheduler.stop_at(1, 0, 2, cluster.now)
    cluster.run()
    assert stream.reason is FinishReason.STOP and stream.finished.usage.output_tokens == 2 and stream.finished.stop_token_id == -1


def test_k_steps_only_while_nobody_waits_and_never_past_a_limit():
    cluster = Cluster(max_steps_per_plan=4, max_plans_in_flight=1)
    cluster.submit(1, PROMPT, 8)
    cluster.submit(2, other_prompt(9), 4)
    steps = []
    while cluster.state.requests:
        steps.append(cluster.plan().num_steps)
        cluster.apply()
    assert steps == [1, 4, 3]
    cluster.submit(3, PROMPT, 40)
    cluster.step()
    assert cluster.plan().num_steps == 4
    cluster.apply()
    cluster.submit(4, PROMPT, 4)
    plan = cluster.plan()
    assert plan.num_steps == 1 and len(plan.admissions) == 1


def test_automatic_steps_follow_the_measured_step_time():
    assert [policy.automatic_steps(step_us) for step_us in (0.0, 100.0, 1000.0, 2700.0, 7999.0, 20_000.0)] == [1, 8, 8, 2, 1, 1]
    cluster = Cluster(max_steps_per_plan=0, max_plans_in_flight=1)
    cluster.submit(1, PROMPT, 20)
    steps = []
    while cluster.state.requests:
        steps.append(cluster.plan().num_steps)
        cluster.apply()
    assert steps[0] == 1 and sum(steps) == 20 and max(steps) <= policy.MOST_AUTOMATIC_STEPS


def test_a_bad_row_ends_and_whoever_shared_its_blocks_starts_over():
    cluster = Cluster(bad=lambda tokens: tokens[:11] == [*PROMPT, 1] and len(tokens) == 11)
    cluster.submit(1, [*PROMPT, 1], 6)
    cluster.submit(2, [*PROMPT, 0], 6)
    cluster.run()
    assert cluster.streams[1, 0].reason is FinishReason.NUMERIC_FAULT and cluster.streams[1, 0].tokens == []
    assert cluster.streams[2, 0].reason is FinishReason.LENGTH
    assert cluster.streams[2, 0].finished.usage.num_preemptions == 1
    assert len(cluster.plans[-1].admissions) == 0


def test_results_of_another_epoch_and_duplicates_change_nothing():
    cluster = Cluster()
    cluster.submit(1, PROMPT, 5)
    cluster.plan()
    result = cluster.results[0]
    cluster.scheduler.apply_result(StepResult(0, 1, 0, result.tokens, bytes([FLAG_BAD])), cluster.now)
    cluster.apply()
    cluster.scheduler.apply_result(result, cluster.now)
    cluster.check()
    assert len(cluster.streams[1, 0].tokens) == 1
    cluster.run()


def test_nothing_more_is_planned_than_may_be_in_flight():
    cluster = Cluster(max_plans_in_flight=2)
    cluster.submit(1, PROMPT, 9)
    assert cluster.plan() and cluster.plan() and cluster.plan() is None
    cluster.apply()
    assert cluster.plan()


def test_an_idle_engine_gathers_a_first_batch():
    cluster = Cluster(batch_delay_us=5000)
    cluster.submit(1, PROMPT, 2)
    assert cluster.plan() is None and cluster.scheduler.next_wakeup() == 5000
    cluster.now = 4000
    cluster.submit(2, PROMPT, 2)
    assert cluster.plan() is None
    cluster.now = 5000
    assert len(cluster.plan().admissions) == 2


def test_each_front_end_learns_of_its_own_requests_only():
    cluster = Cluster()
    mine, theirs = key_of(1, 5), key_of(2, 5)
    cluster.submit(mine, PROMPT, 4)
    cluster.submit(theirs, other_prompt(3), 9)
    cluster.step()
    cluster.scheduler.drop_frontend(2, cluster.now)
    cluster.run()
    assert cluster.streams[mine, 0].reason is FinishReason.LENGTH
    assert cluster.streams[theirs, 0].reason is None  # nobody is left to be told


def test_progress_names_the_phases():
    cluster = Cluster(num_blocks=6, max_num_batched_tokens=8, max_num_seqs=1, progress_interval_us=3000)
    cluster.submit(1, PROMPT, 4)
    cluster.submit(2, other_prompt(3), 2)
    cluster.run()
    phases = [progress.phase for progress in cluster.progress[1]]
    assert phases == [Phase.PREFILLING, Phase.DECODING]
    assert [progress.prefill_done for progress in cluster.progress[1]] == [8, 10]
    assert cluster.progress[2][0].phase is Phase.QUEUED
