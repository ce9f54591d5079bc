"""Every family split over two ranks: the logits are transformers'."""

import pytest
import torch
from worker.family_model import PROMPT, expected_logits, write_family
from worker.two_ranks import logits_of_two

from pagecast_worker.models.registry import architectures


@pytest.mark.parametrize("name", sorted(architectures()))
def test_two_ranks_compute_what_transformers_computes(tmp_path, name):
    folder, model = write_family(name, tmp_path)
    ids, logits = expected_logits(model, PROMPT, 2)
    for got in logits_of_two(folder, ids[-2:]):
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)
