"""Token masks, as they go from grammars to the sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Masks = NDArray[np.int32]
"""[rows, words]: bit i of word w allows token 32 * w + i."""
