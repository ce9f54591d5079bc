"""A list of prompts through LLM, all the way to the plans: computed just in time, where the same in class normal is computed at once."""

from pathlib import Path

import pytest

from pagecast import LLM, SamplingParams
from pagecast_scheduler.core import policy
from pagecast_scheduler.engine.epochs import ARRIVAL_GAP_US
from pagecast_scheduler.engine.replay import read, replay
from pagecast_wire.codec import decode, view_u32
from pagecast_wire.plan import StepPlan

COUNT, LENGTH, LONGEST = 24, 100, 120


def prefills(recording: Path) -> list[int]:
    """Prompt tokens of every plan that has more than one: what looks whether workers answer has one."""
    plans: list[StepPlan] = [decode(body, "to_worker") for _, kind, body in read(recording) if kind == "plan"]
    return [total for plan in plans if (total := sum(view_u32(plan.chunk_lengths).tolist())) > 1]


@pytest.mark.parametrize("priority", ["batch", "normal"])
def test_prompts_are_computed_when_they_must_be(tmp_path: Path, priority: str) -> None:
    """Steps so slow that requests come faster than a batch's prompts are computed. However they come: in class normal a prompt is computed
    whole in the step that finds it, as tokens enough are left; of a batch no step takes more than fits beside its decodes, so some are cut.
    """
    recording = tmp_path / "recording"
    options = {"num_frontends": 1, "max_num_seqs": 64, "max_model_len": 512, "max_num_batched_tokens": 8192, "oracle_step_us": 50_000}
    prompts = [[number + 3] * LENGTH for number in range(COUNT)]
    params = [SamplingParams(max_tokens=4 + 3 * number, ignore_eos=True, detokenize=False) for number in range(COUNT)]
    params[0] = SamplingParams(max_tokens=LONGEST, ignore_eos=True, detokenize=False)
    asked = {} if priority == "batch" else {"priority": priority}
    with LLM(executor="oracle", record=str(recording), **options) as llm:
        outputs = llm.generate(prompts, params, **asked)  # type: ignore[arg-type]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    again = replay(recording)
    assert again.difference is None and again.num_plans, "whatever waited for the rest of the list is a matter of recorded times"
    assert next(body["config"]["arrival_gap_us"] for _, kind, body in read(recording) if kind == "create") == ARRIVAL_GAP_US
    tokens = prefills(recording)
    assert sum(tokens) == COUNT * LENGTH
    cut = [count for count in tokens if count % LENGTH]
    if priority == "batch":
        # Before the longest one has come, the next ones are as urgent as it: five at most are of nearly the same length.
        assert cut and max(tokens) <= 3 * policy.FLAT_STEP
    else:
        assert not cut
