"""Without a GPU kernels run in Triton's interpreter, which must be chosen before the first test imports triton."""

import os
import sys

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
