"""Checkpoints that compressed-tensors quantizes and writes give the logits of that library's own modules."""

import pytest
import torch
from worker import compressed_model
from worker.family_model import PROMPT, Forward, executor_for


@pytest.mark.parametrize("scheme", compressed_model.SCHEMES)
def test_logits_of_the_library(scheme, tmp_path):
    folder, logits = compressed_model.write_compressed(tmp_path, scheme)
    executor = executor_for(folder)
    got = Forward(executor).chunk(PROMPT)
    if scheme.startswith("w8a8"):
        # An activation next to the middle between two of 8 bits may be rounded to the other one: a few logits then differ.
        assert float((got - logits).norm() / logits.norm()) < 0.01
        assert float(((got - logits).abs() < 1e-3).float().mean()) > 0.6
    else:
        torch.testing.assert_close(got, logits, rtol=0, atol=1e-3)
    plain = Forward(executor_for(tmp_path / "plain")).chunk(PROMPT)
    assert float((plain - logits).abs().max()) > 0.01  # the weights differ from those that were rounded
    assert executor.facts.quantization and executor.facts.num_parameters == executor_for(tmp_path / "plain").facts.num_parameters
