"""Steps with prefill end on the sizes that workers name, while requests wait for a row; nobody is late by much for it, or alone."""

from core.cluster import Cluster, make_submit
from hypothesis import example, given
from hypothesis import strategies as st

from pagecast_scheduler.core import intake, policy
from pagecast_scheduler.core.state import State
from pagecast_wire.codec import view_u32

SIZES = st.lists(st.integers(1, 1200), min_size=1, max_size=9, unique=True).map(sorted).map(tuple)


def prompt(length, seed=0):
    return [(seed >> bit % 8) & 1 for bit in range(length)]


def lengths(plan):
    return view_u32(plan.chunk_lengths).tolist()


def full_rows(**values):
    """Three rows that decode, and the one more that there is free."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=32, max_plans_in_flight=1, num_blocks=200, **values)
    for key in range(3):
        cluster.submit(key, [1, 0], 40, seed=key)
    cluster.step()
    return cluster


@given(wanted=st.integers(1, 5000), share=st.floats(0, 1), before=st.integers(1, 1500), sizes=SIZES)
def test_a_step_ends_on_a_size_or_takes_all(wanted, share, before, sizes):
    begun = int(wanted * share)
    length = policy.fitted_length(wanted, begun, before, sizes)
    assert 1 <= length <= wanted
    assert length == wanted or before + length in sizes
    assert length >= min(begun, sizes[-1]) // 2
    reached = [size for size in sizes if before < size <= before + wanted]
    if not begun and reached:
        assert before + length == max(reached)


@given(wanted=st.integers(1, 100_000), before=st.integers(1, 1500), sizes=SIZES)
@example(wanted=59, before=255, sizes=(256, 320))
def test_what_has_begun_is_late_by_few_steps(wanted, before, sizes):
    steps = -(-wanted // max(1, sizes[-1] // 2)) + wanted.bit_length()
    for _ in range(steps):
        wanted -= policy.fitted_length(wanted, wanted, before, sizes) if wanted else 0
    assert wanted == 0


def test_prefill_is_cut_to_a_size_while_others_wait_for_rows():
    cluster = full_rows(step_sizes=(8, 16, 24))
    cluster.submit(10, prompt(20, 77), 2)
    cluster.submit(11, prompt(5, 99), 2)
    plans = [cluster.plan()]
    assert lengths(plans[0]) == [13], "three decodes and thirteen tokens are sixteen"
    cluster.apply()
    plans.append(cluster.plan())
    assert lengths(plans[1]) == [5], "no more rows than these seven tokens need"
    cluster.apply()
    for _ in range(policy.MOST_STEPS_WITHOUT_PREFILL):
        plans.append(cluster.plan())
        assert lengths(plans[-1]) == [], "two tokens wait for more"
        cluster.apply()
    plans.append(cluster.plan())
    assert lengths(plans[-1]) == [2], "the last ones fill no size"
    cluster.apply()
    cluster.run()
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())


def waiting_for_one_row(count):
    """Three rows that decode, and `count` prompts of two tokens for the one row that is left."""
    cluster = full_rows(step_sizes=(8, 16, 24))
    for key in range(10, 10 + count):
        cluster.submit(key, prompt(2, key), 1, seed=key)
    return cluster


def steps_with_prefill(cluster, count):
    chunks = []
    for _ in range(count):
        chunks.append(len(lengths(cluster.plan())))
        cluster.apply()
    return chunks


def test_little_prefill_waits_for_a_few_steps():
    chunks = steps_with_prefill(waiting_for_one_row(7), 20)
    first = chunks.index(1)
    assert first <= policy.MOST_STEPS_WITHOUT_PREFILL
    assert chunks[first : first + 16] == [1, 0, 0, 0] * 4


def test_as_much_prefill_as_there_are_decodes_does_not_wait():
    cluster = full_rows(step_sizes=(8, 16, 24))
    for key in range(10, 15):
        cluster.submit(key, prompt(3, key), 1, seed=key)
    assert steps_with_prefill(cluster, 4) == [1, 1, 1, 1]


def test_a_new_life_counts_its_own_steps():
    """Steps begin at zero again: one of the life before is none to count from."""
    cluster = waiting_for_one_row(14)
    steps_with_prefill(cluster, 26)
    assert cluster.state.prefilled_in > 20
    cluster.fail()
    assert cluster.state.prefilled_in == 0
    cluster.run()
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())


def test_nothing_is_cut_where_nobody_else_waits():
    cluster = full_rows(step_sizes=(8, 16, 24))
    cluster.submit(10, prompt(20, 77), 2)
    assert lengths(cluster.plan()) == [20]


def test_nothing_is_cut_where_few_rows_decode():
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=32, step_sizes=(8, 16, 24))
    for key in range(3):
        cluster.submit(key, prompt(9, key + 70), 4)
    assert lengths(cluster.plan()) == [9, 9]


def test_without_sizes_steps_take_all_that_fits():
    cluster = full_rows()
    cluster.submit(10, prompt(20, 77), 2)
    cluster.submit(11, prompt(5, 99), 2)
    assert lengths(cluster.plan()) == [20]


def test_running_rows_gain_a_token_in_every_step_and_everybody_ends():
    cluster = full_rows(step_sizes=(5, 9, 14, 20))
    for key in range(10, 30):
        cluster.submit(key, prompt(1 + key % 23, key), 3, seed=key)
    for _ in range(30):
        before = [len(cluster.streams[key, 0].tokens) for key in range(3)]
        plan = cluster.plan()
        cluster.apply()
        grown = [len(cluster.streams[key, 0].tokens) - count for key, count in zip(range(3), before, strict=True)]
        assert grown == [1, 1, 1], f"step {plan.step} stalls a running row"
    cluster.run()
    assert all(stream.reason is not None for stream in cluster.streams.values())


def test_looking_ahead_leaves_the_queue_as_it_is():
    state = State.create(Cluster().state.config, 1)
    for key, (length, tenant) in enumerate([(7, "a"), (5, "b"), (9, "a"), (3, "b")]):
        request = intake.build(state, make_submit(key, prompt(length), 1, tenant=tenant), 0)
        request.tenant = state.tenants.enter(tenant)
        state.orders += 1
        state.queue.push(request.sequences[0], 0)
    before = state.queue.waiting()
    assert state.queue.tokens_ahead(4, 1000, 0) == 24
    assert state.queue.tokens_ahead(2, 1000, 0) == 12
    assert state.queue.tokens_ahead(4, 8, 0) == 12, "two have enough"
    assert state.queue.tokens_ahead(0, 8, 0) == 0
    assert state.queue.waiting() == before
