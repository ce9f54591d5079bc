"""Kernels run in Triton's interpreter here, which must be chosen before triton is imported."""

import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
elif os.environ.get("TRITON_INTERPRET") != "1":
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("triton was imported by a test module collected before tests/ops: import it where it is used")
