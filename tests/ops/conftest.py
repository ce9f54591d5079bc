"""Kernels run in Triton's interpreter here, which must be chosen before triton is imported."""

import os
import sys

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
