"""Where kernels are tested: in Triton's interpreter on the CPU, or on a GPU, with QUIRE_TEST_GPU=1.

Without it no test sees a GPU, so that all of them do the same on every machine.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

if os.environ.get("QUIRE_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
HAS_TRITON = find_spec("triton") is not None
NATIVE = torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 instead of its values.
HALF = torch.bfloat16 if NATIVE else torch.float16
DEVICE = torch.device("cuda" if NATIVE else "cpu")
