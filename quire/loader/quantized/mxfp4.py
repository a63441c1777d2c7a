"""Checkpoints of MXFP4 experts: a stack of matrices as 4-bit floats, a power of two for each 32 of them.

experts.gate_up_proj_blocks and _scales are presented as experts.gate_up_proj [experts, outputs, inputs].
"""

from __future__ import annotations

from dataclasses import replace

from quire.layers.quant.rounding import MXFP4
from quire.layers.scheme import Scheme
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint

MXFP4_EXPERTS = replace(MXFP4, roles=(("weight", "_blocks"), ("scales", "_scales")))


class Mxfp4(QuantizedCheckpoint):
    reads = "4-bit floats with a power of two for each 32 (experts of gpt-oss)"
    flat = True  # blocks [experts, outputs, groups, 16 bytes]

    def split(self, name: str) -> tuple[str, str]:
        """experts.gate_up_proj_blocks -> the layer experts.gate_up_proj and its leaf blocks."""
        path, _, leaf = name.rpartition("_")
        return (path, f"_{leaf}") if leaf in ("blocks", "scales") else super().split(name)

    def join(self, path: str, leaf: str) -> str:
        return path + leaf if leaf.startswith("_") else super().join(path, leaf)

    def logical_name(self, path: str) -> str:
        return path

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        return MXFP4_EXPERTS if leaves.keys() & dict.fromkeys(("_blocks", "_scales")) else None

    def shape(self, path: str, scheme: Scheme, leaves: Leaves) -> tuple[int, ...] | None:
        *several, rows, groups, num_bytes = (1, 1, 1, *leaves["_blocks"].shape)[-4:]
        return (*several, rows, groups * num_bytes * 2)
