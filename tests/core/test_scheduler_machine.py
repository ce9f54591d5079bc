"""Random lives of a whole scheduler with a tiny worker: every law holds after every event, every token is the oracle's."""

from core.cluster import Cluster, key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecast_wire.intake import Accepted
from pagecast_wire.sampling import FinishReason

TRUE_ENDS = {FinishReason.LENGTH, FinishReason.STOP}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(4, 24), max_num_seqs=st.integers(1, 5), extra=st.integers(0, 11),
        in_flight=st.integers(1, 3), steps=st.sampled_from([1, 1, 3]), caching=st.booleans(),
        sizes=st.sampled_from([(), (3, 4, 7), (5, 10)]),
    )  # fmt: skip
    def begin(self, block_size, num_blocks, max_num_seqs, extra, in_flight, steps, caching, sizes):
        self.cluster = Cluster(
            block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra,
            max_plans_in_flight=in_flight, max_steps_per_plan=steps, enable_prefix_caching=caching, ageing_us=20_000, max_recoveries=1000,
            step_sizes=sizes,
        )  # fmt: skip
        self.counter = 0
        self.interrupted = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), max_output=st.integers(1, 8), slot=st.integers(0, 1),
        stops=st.sampled_from([(), (), (1,)]), num_sequences=st.sampled_from([1, 1, 1, 2, 3]), priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"), namespace=st.sampled_from([bytes(32), b"x" * 32]), bypass=st.booleans(),
    )  # fmt: skip
    def submit(self, prompt, max_output, slot, stops, num_sequences, priority, tenant, namespace, bypass):
        self.counter += 1
        answer = self.cluster.submit(
            key_of(slot, self.counter), prompt, max_output, stops=stops, seed=self.counter % 3, num_sequences=num_sequences,
            priority=priority, tenant=tenant, cache_namespace=namespace, bypass_prefix_cache=bypass,
        )  # fmt: skip
        config = self.cluster.state.config
        fits = len(prompt) + max_output <= min(config.pool_tokens, config.max_model_len)
        assert isinstance(answer, Accepted) == fits

    @rule()
    def plan(self):
        self.cluster.now += 500
        self.cluster.plan()

    @precondition(lambda self: self.cluster.results)
    @rule()
    def apply(self):
        self.cluster.now += 500
        self.cluster.apply()

    @rule(times=st.integers(1, 6))
    def run_ahead(self, times):
        for _ in range(times):
            self.cluster.step()

    @precondition(lambda self: self.cluster.state.requests)
    @rule(data=st.data())
    def abort(self, data):
        key = data.draw(st.sampled_from(list(self.cluster.state.requests)))
        self.interrupted.add(key)
        self.cluster.scheduler.abort(key, self.cluster.now)

    @precondition(lambda self: self.cluster.state.requests)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data, paused):
        self.cluster.scheduler.pause(data.draw(st.sampled_from(list(self.cluster.state.requests))), paused, self.cluster.now)

    @precondition(lambda self: self.cluster.state.requests)
    @rule(data=st.data())
    def stop_text(self, data):
        key = data.draw(st.sampled_from(list(self.cluster.state.requests)))
        stream = self.cluster.streams[key, 0]
        if stream.reason is None and stream.tokens:
            stream.keep = data.draw(st.integers(0, len(stream.tokens)))
            self.interrupted.add(key)
            self.cluster.scheduler.stop_at(key, 0, stream.keep, self.cluster.now)

    @rule()
    def lose_workers(self):
        self.cluster.fail()

    @invariant()
    def laws(self):
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        for key in list(self.cluster.state.requests):
            self.cluster.scheduler.pause(key, False, self.cluster.now)
        self.cluster.run()
        for (key, _), stream in self.cluster.streams.items():
            allowed = TRUE_ENDS if key not in self.interrupted else TRUE_ENDS | {FinishReason.CANCELLED}
            assert stream.reason in allowed | {FinishReason.POISON_REQUEST}
        assert self.cluster.state.kv.pool.num_referenced == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
