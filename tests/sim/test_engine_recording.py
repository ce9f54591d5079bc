"""What the running engine records, over its sockets and with its clock, replays to the very plans it sent."""

from pathlib import Path

import pytest
from e2e.engine_rig import RigFrontend, engine_thread, rig_workers

from pagecast_scheduler.engine.recorder import Recorder
from pagecast_scheduler.engine.replay import replay
from pagecast_wire.codec import pack_u32
from pagecast_wire.intake import Submit
from pagecast_wire.plan import Admission, StepPlan
from pagecast_wire.result import StepResult
from pagecast_wire.sampling import Constraint, ConstraintKind, SamplingParams, StopRules


def test_a_recording_of_the_engine_replays(tmp_path: Path) -> None:
    """With preemptions, cancels, and requests that time ends while nothing else happens."""
    path = tmp_path / "engine.rec"
    recorder = Recorder(str(path), with_tokens=True)
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
    with engine_thread(tmp_path, record=recorder, **limits), rig_workers(tmp_path, 1, num_blocks=24) as (worker,):
        frontend = RigFrontend(tmp_path).wait_serving()
        keys = [frontend.submit([i % 3] * 20, 60, seed=i) for i in range(8)]
        late = [frontend.submit([7] * 30, 100, seed=90 + i, time_budget_ms=1 + i) for i in range(4)]
        gone = [frontend.submit([9, i], 100, seed=70 + i) for i in range(3)]
        keys += [frontend.submit([3] * 9, 30, seed=50 + i, constraint=Constraint(ConstraintKind.REGEX, "[0-9]+")) for i in range(2)]
        frontend.abort(*gone)
        frontend.wait_finished(*keys, *late, *gone)
        for key in keys:
            frontend.expect(key)
        frontend.close()
        plans = len(worker.plans)
    result = replay(path)
    assert result.compared and result.difference is None, result.difference
    assert result.num_plans >= plans
    assert result.num_requests >= len(keys) + len(late) + len(gone)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_constraints_and_words_are_written_only_on_request(tmp_path: Path, with_tokens: bool) -> None:
    path, ids = tmp_path / "engine.rec", pack_u32([0x51525354])
    sampling = SamplingParams(
        constraint=Constraint(ConstraintKind.CHOICES, '["secret"]'), bad_word_tokens=ids, bad_word_lengths=pack_u32([1]),
        logit_bias_ids=ids, logit_bias_values=bytes(4), allowed_token_ids=ids,
    )  # fmt: skip
    recorder = Recorder(str(path), with_tokens=with_tokens)
    recorder.arrival(1, Submit(1, ids, sampling, StopRules(1), bytes(32)))
    admission = Admission(0, ids, 1, pack_u32([1]), 0, 2, 0, b"", sampling)
    recorder.plan(2, StepPlan(1, 1, admissions=(admission,), forced_tokens=ids))
    recorder.result(3, StepResult(1, 1, 0, tokens=ids, flags=b"\0", prompt_top_ids=ids, top_ids=ids, forced_tokens=ids))
    recorder.close()
    written = path.read_bytes()
    assert (b"secret" in written) == (ids in written) == with_tokens
