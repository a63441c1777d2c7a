"""The host: where tables are computed whose bits must not depend on the device."""

from __future__ import annotations

import torch

HOST = torch.device("cpu")
