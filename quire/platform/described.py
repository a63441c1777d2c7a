"""A GPU that is not at hand, as far as a plan of memory needs it."""

from __future__ import annotations

from quire.platform.base import MemorySupply
from quire.platform.cuda import CudaPlatform


class DescribedCuda(CudaPlatform):
    is_here = False

    def __init__(self, name: str, total: int, free: int) -> None:
        self._name, self._total, self._free = name, total, free

    def start(self, num_threads: int | None) -> None:
        return None

    @property
    def hardware(self) -> str:
        return f"cuda {self._name}"

    def available_memory(self, utilization: float = 1.0, card: int = 0) -> MemorySupply:
        left = max(0, self._free - int(self._total * (1.0 - utilization)))
        return MemorySupply(left, f"of one {self._name}", "raise --gpu-memory-utilization, or use more cards")
