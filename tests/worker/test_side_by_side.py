"""Two pieces of a step side by side: both are done, and what comes after sees both."""

import pytest
import torch

from pagecast_worker.layers.side_by_side import side_by_side


def test_without_a_gpu_one_follows_the_other() -> None:
    done: list[str] = []
    side_by_side(torch.device("cpu"), lambda: done.append("first"), lambda: done.append("second"))
    assert done == ["first", "second"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_what_comes_after_waits_for_both(captured: bool) -> None:
    """Long first, so that who did not wait would read what is not there yet."""
    device = torch.device("cuda", torch.cuda.current_device())
    base = torch.zeros((), device=device)
    big, parts, total = torch.ones(4096, 4096, device=device), torch.zeros(2, device=device), torch.zeros((), device=device)

    def first() -> None:
        value = big
        for _ in range(8):
            value = (value @ big) / 4096
        parts[0] = value.mean() + base

    def step() -> None:
        base.add_(1)
        side_by_side(device, first, lambda: parts[1:].copy_(base * 10))
        total.copy_(parts.sum())

    if captured:
        graph = torch.cuda.CUDAGraph()
        side_by_side(device, first, lambda: None)  # what a first call sets up is not to be captured
        with torch.cuda.graph(graph):
            step()
        repeat = graph.replay
    else:
        repeat = step
    for number in range(1, 4):
        repeat()
        assert total.item() == pytest.approx(1 + number + 10 * number)
