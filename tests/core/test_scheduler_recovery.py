"""The loss of a worker group: nobody loses a token, and whoever causes it is found."""

import pytest
from core.cluster import Cluster

from pagecast_scheduler.core.recovery import Loss
from pagecast_wire.codec import view_u32
from pagecast_wire.intake import Accepted, Phase, Rejected
from pagecast_wire.sampling import FinishReason

LONG = 24


class Crashing(Cluster):
    """The worker group dies when a plan computes the poison token: position `at` of the request with seed `seed`."""

    def __init__(self, seed, at, loss=Loss.CRASH, **values):
        super().__init__(**values)
        self.loss = loss
        self.seed, self.at = seed, at
        self.num_crashes = 0

    def step(self):
        plan = self.plan()
        if any(row.seed == self.seed and len(row.tokens) > self.at for row in self.worker.rows.values()):
            self.num_crashes += 1
            self.fail(self.loss)
            return True
        if plan is None and not self.results:
            return False
        self.apply()
        self.now += 1000
        return True


@pytest.mark.parametrize("in_flight", [1, 3])
def test_streams_go_on_after_a_loss(in_flight):
    cluster = Cluster(max_plans_in_flight=in_flight, max_num_seqs=3)
    for key in (1, 2, 3, 4):
        cluster.submit(key, [1, key & 1, 0], 12, seed=key)
    for crash in range(3):
        for _ in range(4 + crash):
            cluster.plan()
            if len(cluster.results) == in_flight:
                cluster.apply()
        cluster.fail()
        assert cluster.state.step == 0 and cluster.scheduler.stats().num_blocks_referenced == 0
    cluster.run()
    assert {stream.reason for stream in cluster.streams.values()} == {FinishReason.LENGTH}
    assert cluster.progress[1][-1].phase is not Phase.RECOVERING
    assert cluster.streams[1, 0].finished.usage.num_recoveries >= 1


def test_a_new_epoch_begins_with_step_one_and_an_empty_cache():
    cluster = Cluster()
    cluster.submit(1, [1] * 9, 4)
    cluster.plan()
    cluster.fail()
    assert len(cluster.state.kv.cache) == 0
    plan = cluster.plan()
    assert (plan.epoch, plan.step, plan.released) == (2, 1, b"") and plan.admissions[0].num_computed_tokens == 0
    cluster.run()


def test_nobody_is_refused_for_how_slow_new_workers_begin():
    cluster = Cluster(max_plans_in_flight=1)
    cluster.submit(1, [1], 30)
    for _ in range(30):
        cluster.plan()
        cluster.now += 1000
        cluster.apply()
    assert isinstance(cluster.submit(2, [1], 30, deadline_ms=10), Rejected)
    cluster.fail()
    assert isinstance(cluster.submit(3, [1], 30, deadline_ms=10), Accepted)
    cluster.plan()
    cluster.now += 5_000_000
    cluster.apply()
    assert isinstance(cluster.submit(4, [1], 30, deadline_ms=10), Accepted)


def test_a_history_of_applied_tokens_only_is_sent_again():
    cluster = Cluster(max_plans_in_flight=3)
    cluster.submit(1, [1, 0, 1], 9)
    cluster.plan()
    cluster.apply()
    cluster.plan()
    cluster.plan()  # two tokens sampled by the worker that nobody was told of
    cluster.fail()
    (entry,) = cluster.plan().admissions
    assert len(view_u32(entry.tokens)) == 4 and entry.num_prompt_tokens == 3
    cluster.run()


@pytest.mark.parametrize(("loss", "end"), [(Loss.CRASH, FinishReason.POISON_REQUEST), (Loss.MEMORY, FinishReason.STEP_MEMORY)])
def test_a_poison_request_ends_and_the_rest_live(loss, end):
    cluster = Crashing(seed=2, at=8, loss=loss)
    for key in (1, 2, 3):
        cluster.submit(key, [1, key & 1, 0], LONG, seed=key)
    cluster.run()
    assert [cluster.streams[key, 0].reason for key in (1, 2, 3)] == [
        FinishReason.LENGTH, end, FinishReason.LENGTH,
    ]  # fmt: skip
    assert cluster.num_crashes == 3


def test_workers_that_an_operator_restarts_make_no_suspects():
    cluster = Cluster(max_plans_in_flight=2, max_recoveries=1)
    for key in (1, 2):
        cluster.submit(key, [1, key & 1, 0], LONG, seed=key)
    for _ in range(4):
        cluster.step()
        cluster.plan()
        cluster.fail(Loss.ORDERED)
    assert not cluster.state.suspects and all(request.num_crashes == 0 for request in cluster.state.requests.values())
    cluster.run()
    assert {stream.reason for stream in cluster.streams.values()} == {FinishReason.LENGTH}


def test_a_suspect_runs_alone_and_is_cleared_once_past_the_crash():
    cluster = Cluster(max_plans_in_flight=1)
    for key in (1, 2):
        cluster.submit(key, [1, key & 1, 0], LONG, seed=key)
    for _ in range(2):
        cluster.step()
        cluster.plan()
        cluster.fail()
    assert len(cluster.state.suspects) == 2
    together = 0
    for _ in range(40):
        if not cluster.state.suspects:
            break
        assert cluster.state.rows.num_active <= 1
        cluster.step()
        together += 1
    assert not cluster.state.suspects and together >= 2
    cluster.run()
    assert {stream.reason for stream in cluster.streams.values()} == {FinishReason.LENGTH}


def test_a_paused_suspect_does_not_keep_others_waiting():
    cluster = Cluster(max_plans_in_flight=1)
    cluster.submit(1, [1, 1], LONG)
    for _ in range(2):
        cluster.plan()
        cluster.fail()
    cluster.submit(2, [1, 0], 3)
    cluster.scheduler.pause(1, True, cluster.now)
    while cluster.step():
        pass
    assert cluster.streams[2, 0].reason is FinishReason.LENGTH
    cluster.scheduler.pause(1, False, cluster.now)
    cluster.run()
    assert cluster.streams[1, 0].reason is FinishReason.LENGTH


def test_the_recovery_budget_is_finite():
    cluster = Cluster(max_recoveries=2)
    cluster.submit(1, [1, 0], LONG)
    for _ in range(3):
        cluster.step()
        cluster.scheduler.pause(1, True, 0)  # present, but with nothing in flight: not a suspect
        while cluster.step():
            pass
        cluster.fail()
        cluster.scheduler.pause(1, False, 0)
    assert cluster.streams[1, 0].reason is FinishReason.WORKER_LOST


def test_a_loss_with_nothing_in_flight_blames_nobody():
    cluster = Cluster(max_plans_in_flight=1)
    cluster.submit(1, [1, 0], LONG)
    for _ in range(5):
        cluster.step()
        cluster.fail()
    assert not cluster.state.suspects
    cluster.run()
