"""How it is found out which gate and up products take one launch with SiLU·mul."""

from typing import Any

import pytest
import torch

from pagecast_kernels import bench_cases, configs, few_rows, product_table, reference, tune_gated
from pagecast_kernels.few_rows import FewRows

RIGHT, WRONG, OTHER = FewRows(0), FewRows(1), FewRows(2)


@pytest.fixture
def us(monkeypatch: pytest.MonkeyPatch) -> dict[FewRows | None, float]:
    """What each launch takes, None being two launches; WRONG gets one number wrong, and wins if it may."""
    times: dict[FewRows | None, float] = {None: 10.0, RIGHT: 9.0, WRONG: 1.0, OTHER: 9.5}

    def launched(config: FewRows, scratch: few_rows.Scratch) -> product_table.Gated:
        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float | None) -> None:
            out.copy_(reference.linear_silu_mul(x.float(), weight.float(), eps))
            if config == WRONG:
                out[0, 1] += 3.0

        return run

    def in_turn(cases: dict[Any, Any], rounds: int, least_us: float) -> dict[Any, float]:
        for launches in cases.values():
            launches[-1]()
        return {name: times[name] for name in cases}

    monkeypatch.setattr(product_table, "gated_run", launched)
    monkeypatch.setattr(bench_cases, "in_turn", in_turn)
    monkeypatch.setattr(configs, "processors", lambda device: 132)
    monkeypatch.setattr(few_rows, "candidates", lambda rows, columns, processors: [WRONG, RIGHT, OTHER])
    return times


def found(rows: int = 40) -> tune_gated.FoundGated:
    torch.manual_seed(0)
    weights = [torch.randn(64, 128).bfloat16() / 11 for _ in range(2)]
    return tune_gated.find(rows, weights, few_rows.scratch(torch.device("cpu")))


def test_the_fastest_that_is_right_is_taken(us: dict[FewRows | None, float]) -> None:
    assert found() == (RIGHT, 9.0, 10.0, 1)
    us[OTHER] = 8.0
    assert found() == (OTHER, 8.0, 10.0, 1)


def test_two_launches_stay_where_one_gains_nothing(us: dict[FewRows | None, float]) -> None:
    us[RIGHT] = us[OTHER] = 9.95
    assert found() == (None, 10.0, 10.0, 1)


def test_what_was_found_is_told_and_kept() -> None:
    shape = {(64, 128): {16: tune_gated.FoundGated(RIGHT, 8.0, 10.0, 0), 32: tune_gated.FoundGated(None, 10.0, 10.0, 1)}, (8, 8): {}}
    assert tune_gated.metrics(shape) == {"kernels.tune.gated.64x128.M16.ratio": 1.25, "kernels.tune.gated.64x128.M32.ratio": 1.0}
    assert tune_gated.gated_json(shape) == {"bfloat16 64 128": {"16": {"few_rows": {"turn": 0}}, "32": None}}
