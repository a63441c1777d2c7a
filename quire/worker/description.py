"""WorkerDescription: what an engine has to know of the worker behind an executor, as data."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.resolve import ResolvedConfig
from quire.planning.ledger import MemoryLedger
from quire.types.pooling import PoolerConfig


@dataclass(frozen=True)
class WorkerDescription:
    architecture: str
    vocab_size: int
    hidden_size: int
    settings: ResolvedConfig
    ledger: MemoryLedger  # with the KV layout, the number of blocks and the longest context
    step_times: tuple[float, float, float, float]  # of a middling model on this device, see Platform
    pooler: PoolerConfig | None  # None: it only generates
    is_bidirectional: bool  # every prompt has to be computed in one step
    kernel_path: dict[str, str]  # what decides the bits of a result, besides the model: device, instructions, types
    routes: bool  # its layers have experts
    step_sizes: tuple[int, ...]  # numbers of tokens that mixed steps are padded to, up to the largest of them
    query_tile: int  # tokens of a prompt that attention computes together
