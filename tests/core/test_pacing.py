"""Requests of class BATCH: the longest outputs begin first, and prompts are spread over the steps of those that run, so that all end with
the longest. Nobody in a hurry is held up for it."""

import pytest
from core.cluster import Cluster, make_config, make_submit
from hypothesis import given
from hypothesis import strategies as st

from pagecast_scheduler.core import intake, policy
from pagecast_scheduler.core.backlog import GRAIN, Backlog
from pagecast_scheduler.core.request import PATIENT_US
from pagecast_scheduler.core.state import State
from pagecast_wire.codec import view_u32
from pagecast_wire.control import WaitCause
from pagecast_wire.intake import Priority

LONGEST = 120
SPARE = 4  # steps in which the first prompts are computed


def prefill(plan):
    return sum(view_u32(plan.chunk_lengths).tolist())


def prompt(key, length=100):
    return [(key >> bit % 6) & 1 for bit in range(length)]


def wide(**values):
    """Rows, blocks and tokens enough for all."""
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "num_blocks": 8000, "max_model_len": 512, "max_plans_in_flight": 1}
    sizes["enable_prefix_caching"] = False
    return Cluster(**sizes | values)


def offer(cluster, outputs, **values):
    for key, output in enumerate(outputs):
        cluster.submit(key, prompt(key), output, seed=key, **values)


OUTPUTS = [LONGEST, *range(4, LONGEST - 20, 4)]


@pytest.mark.parametrize("limits", [{}, {"deadline_ms": 86_400_000}], ids=["no limit", "a server's own"])
def test_all_end_with_the_longest_and_prompts_are_spread(limits):
    cluster = wide()
    offer(cluster, reversed(OUTPUTS), priority=Priority.BATCH, **limits)
    cluster.run()
    assert len(cluster.plans) <= LONGEST + SPARE
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())
    most = max(prefill(plan) for plan in cluster.plans)
    assert most <= 2 * policy.FLAT_STEP < len(OUTPUTS) * 100


def test_other_classes_begin_at_once():
    cluster = wide()
    offer(cluster, OUTPUTS)
    assert prefill(cluster.plan()) == len(OUTPUTS) * 100


@pytest.mark.parametrize("limit", ["deadline_ms", "time_budget_ms", "max_queue_ms"])
def test_one_with_a_limit_holds_nobody_up(limit):
    """Its own time is short: it and what stands before it begin as soon as they can."""
    cluster = wide()
    offer(cluster, OUTPUTS, priority=Priority.BATCH)
    cluster.submit(99, prompt(99), 5, priority=Priority.BATCH, **{limit: 60_000})
    assert prefill(cluster.plan()) == (len(OUTPUTS) + 1) * 100


def test_one_in_a_hurry_ends_the_patience_of_all():
    cluster = wide()
    offer(cluster, OUTPUTS, priority=Priority.BATCH)
    assert prefill(cluster.plan()) <= policy.FLAT_STEP + policy.STEP_GRAIN
    cluster.apply()
    cluster.submit(99, prompt(99), 5, priority=Priority.INTERACTIVE)
    plan = cluster.plan()
    assert prefill(plan) > 10 * 100, "all that waits"
    assert any(view_u32(admission.tokens).tolist() == prompt(99) for admission in plan.admissions)
    cluster.apply()
    cluster.run()


def test_equal_outputs_begin_at_once():
    """None may start later than another, so waiting would only add steps."""
    cluster = wide()
    offer(cluster, [50] * 20, priority=Priority.BATCH)
    cluster.run()
    assert prefill(cluster.plans[0]) == 20 * 100
    assert len(cluster.plans) == 50


def test_without_rows_enough_the_longest_begin_first():
    cluster = wide(max_num_seqs=4)
    outputs = [5, 60, 7, 50, 9, 40, 11, 30]
    offer(cluster, outputs, priority=Priority.BATCH)
    cluster.run()
    begun = [outputs[admission.sampling.seed] for plan in cluster.plans for admission in plan.admissions]
    assert begun == sorted(outputs, reverse=True)
    assert len(cluster.plans) <= 70


def test_the_order_of_other_classes_is_that_of_their_arrival():
    cluster = wide(max_num_seqs=1)
    offer(cluster, [5, 9, 7])
    cluster.run()
    assert [admission.sampling.seed for plan in cluster.plans for admission in plan.admissions] == [0, 1, 2]


def test_preempted_and_recovered_ones_are_counted_as_they_are():
    """The check of the core's own invariants, after every step, holds the backlog against who waits."""
    cluster = Cluster(max_num_seqs=6, max_num_batched_tokens=300, num_blocks=40, max_model_len=128, max_plans_in_flight=2)
    for key in range(12):
        cluster.submit(key, prompt(key, 20), 12 + 3 * (key % 5), seed=key, priority=Priority.BATCH)
    for turn in range(40):
        cluster.step()
        if turn in (7, 19):
            cluster.fail()
    cluster.run()
    assert cluster.state.totals.num_preemptions and cluster.state.queue.backlog.num_sequences == 0
    assert all(stream.tokens == stream.expected for stream in cluster.streams.values())


def sequences_of(lengths):
    state = State.create(make_config(max_model_len=4096, num_blocks=5000), 1)
    found = []
    for key, (tokens, output) in enumerate(lengths):
        found += intake.build(state, make_submit(key, [1] * tokens, output, priority=Priority.BATCH), 0).sequences
    return found


@given(
    lengths=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), max_size=12),
    longest=st.integers(0, 1000), begun=st.integers(0, 500), begun_output=st.integers(0, 900),
)  # fmt: skip
def test_the_pace_is_what_the_most_urgent_sums_ask_for(lengths, longest, begun, begun_output):
    backlog = Backlog(4096)
    for seq in sequences_of(lengths):
        backlog.add(seq)
    begun_output = begun_output if begun else 0
    # Who waits in a class of outputs is taken for one with the longest of it, and comes with all of the class.
    classes = sorted({output // GRAIN for _, output in lengths}, reverse=True)
    last = max([longest, begun_output, *(which * GRAIN + GRAIN - 1 for which in classes)])
    pace, slack = backlog.tokens_a_step(last, begun, begun_output)
    wanted = [begun / (last - begun_output + 1)]
    for which in classes:
        due = begun + sum(tokens for tokens, output in lengths if output // GRAIN >= which)
        wanted.append(due / (last - (which * GRAIN + GRAIN - 1) + 1))
    assert pace == pytest.approx(max(wanted))
    latest = [begun_output] * (begun > 0) + [which * GRAIN + GRAIN - 1 for which in classes[:1]]
    assert slack == last - max(latest, default=0)


@given(
    needed=st.floats(0, 5000), steps=st.integers(1, 100), decodes=st.integers(0, 300), slack=st.integers(0, 3), begun=st.booleans()
)  # fmt: skip
def test_paced_prefill_fills_steps_and_is_never_late(needed, steps, decodes, slack, begun):
    tokens = policy.paced_prefill(needed, steps, decodes, slack, begun)
    assert (decodes + tokens) % policy.STEP_GRAIN == 0 or not tokens
    few = decodes <= policy.FLAT_STEP - policy.LEAST_FILL
    if tokens:
        assert tokens >= needed and decodes + tokens >= policy.FLAT_STEP and (few or tokens >= policy.BULK)
    else:
        assert not few and needed * steps < policy.BULK and (slack or (steps < policy.MOST_STEPS_LATE and not begun))


@pytest.fixture
def many_decodes(monkeypatch):
    """Prompts wait for a bulk beside any decode, as they do beside a hundred of them: the same, only faster."""
    monkeypatch.setattr(policy, "LEAST_FILL", policy.FLAT_STEP)


def late_comers(outputs, most_steps=200, **values):
    """After how many steps each of some one-token prompts is admitted that come while a long output is under way."""
    cluster = wide(**values)
    cluster.submit(0, prompt(0, 1), LONGEST, priority=Priority.BATCH)
    cluster.step()
    cluster.step()
    for key, output in enumerate(outputs, 1):
        cluster.submit(key, prompt(key, 1), output, seed=key, priority=Priority.BATCH)
    before = len(cluster.plans)
    cluster.run(most_steps)
    plans = cluster.plans[before:]
    return [at for at, plan in enumerate(plans) for _ in plan.admissions], len(plans)


@pytest.mark.usefixtures("many_decodes")
def test_a_prompt_without_bulk_waits_only_while_that_costs_nothing():
    starts, steps = late_comers([LONGEST])
    assert starts == [policy.MOST_STEPS_LATE - 2] and steps == starts[0] + LONGEST
    starts, steps = late_comers([LONGEST // 2])
    assert starts[0] > LONGEST // 4 and steps <= LONGEST


@pytest.mark.usefixtures("many_decodes")
def test_the_rest_of_a_begun_prompt_goes_on_at_once_where_waiting_costs():
    """A decode took the last token of a step's budget: the prompt that lacks it is the last to end."""
    cluster = wide(max_num_batched_tokens=1100)
    offer(cluster, [LONGEST], priority=Priority.BATCH)
    cluster.step()
    for key in range(1, 12):
        cluster.submit(key, prompt(key), LONGEST, seed=key, priority=Priority.BATCH)
    cluster.run()
    assert [prefill(plan) for plan in cluster.plans[1:4]] == [1099, 1, 0]
    assert len(cluster.plans) == 2 + LONGEST


@pytest.mark.usefixtures("many_decodes")
@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_blocks": 60}], ids=["rows", "blocks"])
def test_where_some_follow_others_nobody_waits_for_a_bulk(scarce):
    starts, _ = late_comers([20] * 4, **scarce)
    assert starts[0] < policy.MOST_STEPS_LATE
    starts, _ = late_comers([20] * 4)
    assert starts[0] > LONGEST // 2


@pytest.mark.usefixtures("many_decodes")
@pytest.mark.parametrize("limit", ["deadline_ms", "time_budget_ms", "max_queue_ms"])
def test_a_limit_that_comes_near_ends_the_patience(limit):
    cluster = wide()
    cluster.submit(0, prompt(0, 1), LONGEST, priority=Priority.BATCH)
    cluster.step()
    cluster.submit(1, prompt(1, 9), 5, seed=1, priority=Priority.BATCH, **{limit: PATIENT_US // 1000 + 20})
    for _ in range(18):
        assert not cluster.plan().admissions
        cluster.apply()
        cluster.now += 1000
    cluster.now += 5000
    assert len(cluster.plan().admissions) == 1
    cluster.apply()
    cluster.run()


@pytest.mark.usefixtures("many_decodes")
@pytest.mark.parametrize("priority", [Priority.BATCH, Priority.NORMAL])
def test_who_is_paced_is_told_so(priority):
    cluster = wide()
    cluster.submit(0, prompt(0, 1), LONGEST, priority=Priority.BATCH)
    cluster.step()
    for key in (1, 2):
        cluster.submit(key, prompt(key, 9), 5, seed=key, priority=priority)
    causes = [cluster.scheduler.explain(cluster.now)[key].cause for key in (0, 1, 2)]
    first = WaitCause.PACED if priority == Priority.BATCH else WaitCause.NEXT
    assert causes == [WaitCause.NONE, first, WaitCause.BEHIND]
    assert len(cluster.plan().admissions) == (0 if priority == Priority.BATCH else 2)


def test_who_comes_after_a_paced_prompt_is_told_so():
    """Beside few decodes prompts come by a flat step: what began before fills it, though not max_num_batched_tokens."""
    cluster = wide()
    offer(cluster, [LONGEST] + [20] * 3, priority=Priority.BATCH)
    cluster.submit(9, prompt(9, 400), 30, seed=9, priority=Priority.BATCH)
    while cluster.scheduler.explain(cluster.now)[9].cause is not WaitCause.NONE:
        cluster.step()
    waiting = [wait.cause for wait in cluster.scheduler.explain(cluster.now).values() if wait.cause is not WaitCause.NONE]
    assert waiting[0] is WaitCause.PACED and set(waiting[1:]) == {WaitCause.BEHIND}


def test_no_row_stands_idle_while_more_wait_than_there_are_rows():
    """Then the end is not decided by the longest, but by how full the rows are."""
    steps = {}
    for priority in (Priority.NORMAL, Priority.BATCH):
        cluster = wide(max_num_seqs=8)
        offer(cluster, sorted(OUTPUTS, reverse=True), priority=priority)
        assert len(cluster.plan().admissions) == 8
        cluster.apply()
        cluster.run()
        steps[priority] = len(cluster.plans)
    assert steps[Priority.BATCH] <= steps[Priority.NORMAL]


def test_where_blocks_are_fewer_than_rows_they_are_what_is_kept_busy():
    """All rows are enough for all, but the blocks hold a third of them at once, and the longest is little longer than the others."""
    outputs = [50 + key % 20 for key in range(24)]
    steps = {}
    for priority in (Priority.NORMAL, Priority.BATCH):
        cluster = wide(num_blocks=8 * 43)
        offer(cluster, sorted(outputs, reverse=True), priority=priority)
        assert prefill(cluster.plan()) > 7 * 100
        cluster.apply()
        cluster.run()
        steps[priority] = len(cluster.plans)
    assert steps[Priority.BATCH] <= steps[Priority.NORMAL]


def test_rows_that_would_not_be_busy_may_stand_idle():
    """More wait than there are rows, but the longest output alone takes longer than all others one after the other in the other rows."""
    outputs = [LONGEST, *[10] * 30]
    cluster = wide(max_num_seqs=8)
    offer(cluster, outputs, priority=Priority.BATCH)
    assert prefill(cluster.plan()) <= policy.FLAT_STEP + policy.STEP_GRAIN
    cluster.apply()
    cluster.run()
    assert len(cluster.plans) <= LONGEST + SPARE
    assert not policy.rows_decide(sum(outputs), LONGEST, 8) and policy.rows_decide(sum(outputs), LONGEST, 4)


@pytest.mark.usefixtures("many_decodes")
def test_who_was_put_off_comes_no_sooner_for_it_than_one_in_a_hurry():
    """Those who wait by their own leave do not age; once others keep them waiting, they do."""
    cluster = wide(max_num_batched_tokens=150, ageing_us=5000)
    cluster.submit(0, prompt(0, 1), LONGEST, priority=Priority.BATCH)
    cluster.step()
    for key in range(1, 9):
        cluster.submit(key, prompt(key, 9), 5, seed=key, priority=Priority.BATCH)
    for _ in range(30):
        assert cluster.step()
    assert len(cluster.state.queue) == 8 and cluster.now > 4 * 5000
    for key in range(9, 60):
        cluster.submit(key, prompt(key, 100), 5, seed=key, priority=Priority.INTERACTIVE)
    cluster.plan()
    assert [admission.sampling.seed for admission in cluster.plans[-1].admissions] == [9, 10]
    cluster.apply()
    before = len(cluster.plans)
    cluster.now += 4 * 5000
    while len(cluster.state.queue) and len(cluster.plans) < before + 40:
        cluster.step()
    first = next(at for at, plan in enumerate(cluster.plans) if any(0 < a.sampling.seed < 9 for a in plan.admissions))
    assert first < before + 30, "overdue, before the last of those in a hurry"
    cluster.run()
