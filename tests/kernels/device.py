"""Where kernels are tested: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
NATIVE = torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 instead of its values.
HALF = torch.bfloat16 if NATIVE else torch.float16
DEVICE = torch.device("cuda" if NATIVE else "cpu")
