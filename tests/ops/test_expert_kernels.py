"""Routing and grouped products in the interpreter against float64: softmax and sigmoid, groups, corrections, ragged lists, no numbers."""

import pytest
import torch
from ops.paged_case import relative_error

from pagecast_kernels import configs, expert_configs, experts, reference
from pagecast_kernels.routing import Routing

ROUTINGS = {
    "qwen": (16, Routing(4)),
    "mixtral": (8, Routing(2)),
    "not renormalised": (6, Routing(3, renormalise=False, scale=1.5)),
    "best groups": (40, Routing(3, renormalise=False, scale=16.0, groups=8, chosen_groups=3)),
    "two best of a group": (32, Routing(6, sigmoid=True, scale=2.5, groups=4, chosen_groups=2, group_top=2)),
}


def inputs(seed: int, tokens: int, count: int, hidden: int = 48, inner: int = 24) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (tokens, hidden), (tokens, count), (count, 2 * inner, hidden), (count, hidden, inner), (count,)
    return [torch.randn(shape, generator=g) * (0.3 if len(shape) == 3 else 1.0) for shape in shapes]


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_route_equals_float64(name: str, biased: bool) -> None:
    count, routing = ROUTINGS[name]
    _, logits, _, _, bias = inputs(1, 37, count)
    bias = bias * 0.1 if biased else None
    counts = experts.experts_workspace(count, "cpu")
    weights, ids, lists = experts.route(logits, bias, routing, counts)
    wanted, expected = reference.route(logits.double(), None if bias is None else bias.double(), routing)
    assert torch.equal(ids.long(), expected)
    assert relative_error(weights, wanted) < 1e-6
    assert torch.equal(counts.long(), torch.bincount(expected.flatten(), minlength=count))
    for expert in range(count):
        pairs = sorted(lists[expert, : counts[expert]].tolist())
        assert pairs == torch.nonzero(expected.flatten() == expert).flatten().tolist()


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_mixture_equals_float64(name: str, tokens: int) -> None:
    count, routing = ROUTINGS[name]
    x, logits, gate_up, down, bias = inputs(tokens, tokens, count)
    work = experts.experts_workspace(count, "cpu")
    got = experts.mixture(x, logits, gate_up, down, routing, bias=bias, workspace=work)
    exact = [value.double() for value in (x, logits, gate_up, down)]
    assert relative_error(got, reference.mixture(*exact, routing, bias=bias.double())) < 1e-5
    assert not work.any()


def test_mixture_with_gelu_adds_to_what_is_there() -> None:
    x, logits, gate_up, down, _ = inputs(3, 9, 8)
    base = torch.randn_like(x)
    into = base.clone()
    got = experts.mixture(x, logits, gate_up, down, Routing(2), gelu=True, into=into)
    exact = [value.double() for value in (x, logits, gate_up, down)]
    assert got is into
    assert relative_error(got - base, reference.mixture(*exact, Routing(2), gelu=True)) < 1e-5


@pytest.mark.parametrize("rows", [16, 32])
def test_every_token_to_the_same_experts(rows: int) -> None:
    x, _, gate_up, down, _ = inputs(4, 50, 8)
    logits = torch.tensor([0.0, 9.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]).expand(50, 8)
    config = expert_configs.Experts(rows, 16, 16, 4, 2)
    got = experts.mixture(x, logits, gate_up, down, Routing(2), config=(config, config))
    exact = [value.double() for value in (x, logits, gate_up, down)]
    assert relative_error(got, reference.mixture(*exact, Routing(2))) < 1e-5


def test_logits_that_are_no_numbers_spoil_their_own_row_alone() -> None:
    x, logits, gate_up, down, _ = inputs(5, 6, 8)
    clean = experts.mixture(x, logits, gate_up, down, Routing(3))
    logits[2] = float("nan")
    got = experts.mixture(x, logits, gate_up, down, Routing(3))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], clean[others]) and not got[2].isfinite().any()


WIDE = {
    "plain": expert_configs.Experts(16, 16, 16, 4, 2, wide=True),
    "two products": expert_configs.Experts(32, 16, 16, 4, 3, wide=True, extra=16),
    "short tiles": expert_configs.Experts(32, 16, 16, 4, 2, wide=True, extra=16, short=16),
    "sizes that no tile divides": expert_configs.Experts(16, 32, 32, 4, 2, wide=True, extra=16),
    "boxes of the copy engine": expert_configs.Experts(16, 8, 8, 4, 2, wide=True, extra=16),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("tokens", [1, 16, 33, 48, 50])
def test_wide_products_equal_float64(name: str, tokens: int) -> None:
    """Two experts have every token, so that their tiles end at each bound; others have a few or none."""
    x, logits, gate_up, down, _ = inputs(tokens, tokens, 8)
    logits[:, 1] += 20.0
    logits[:, 3] += 20.0
    config = WIDE[name]
    got = experts.mixture(x, logits, gate_up, down, Routing(3), config=(config, config))
    exact = [value.double() for value in (x, logits, gate_up, down)]
    assert relative_error(got, reference.mixture(*exact, Routing(3))) < 1e-5


def test_wide_products_with_gelu_add_to_what_is_there() -> None:
    x, logits, gate_up, down, _ = inputs(3, 40, 8)
    base = torch.randn_like(x)
    into, config = base.clone(), WIDE["two products"]
    got = experts.mixture(x, logits, gate_up, down, Routing(2), gelu=True, into=into, config=(config, config))
    exact = [value.double() for value in (x, logits, gate_up, down)]
    assert relative_error(got - base, reference.mixture(*exact, Routing(2), gelu=True)) < 1e-5


def test_launches_of_many_pairs_are_wide_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(launch.wide for launch in expert_configs.experts(16384, 128, 2, "cpu"))
    monkeypatch.setattr(configs, "is_hopper", lambda device: True)
    assert all(launch.wide for launch in expert_configs.experts(16384, 128, 2, "cuda"))
    assert not any(launch.wide for launch in expert_configs.experts(16384, 128, 4, "cuda") + expert_configs.experts(64, 128, 2, "cuda"))
