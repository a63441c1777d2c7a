"""What a trace holds: a header, then what entered the engine, what became ready, and what each step planned and gave.

Digests are of msgpack bytes, so that they are equal on every machine. Imports no torch.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.setup import SchedulerSetup
from quire.kv.hashing import root_hash
from quire.sched.drafters.forced import Forced
from quire.types.messages import AbortRequests, Command
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import StepPlan, StepResult

FORMAT = 2

# The parts of a plan that are told apart when two runs differ.
PLAN_PARTS = ("rows and num_tokens", "freed_rows and starts", "block tables", "drafts, masks and adapters")
RESULT_PARTS = ("logprobs", "prompt_logprobs", "errors", "pooled", "routed_experts", "proposals")


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """How the engine was set up. A life of an engine may fill several files, each with this and its number."""

    format: int
    version: str  # of Quire
    life: str  # names one start of an engine
    segment: int  # 0: the engine's first
    began: float  # time.time()
    config: EngineConfig
    setup: SchedulerSetup
    model_digest: str
    kernel_path: dict[str, str]  # what decides the bits of results: device, instruction set, types, backend
    redacted: bool


class Took(msgspec.Struct, frozen=True, array_like=True, tag=1):
    message: EngineRequest | AbortRequests | Command
    at: float  # on the core's clock, since the life began


class TookRedacted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request without its tokens: lengths, and a salted hash of every block's prefix."""

    request_id: str
    at: float
    num_tokens: int
    num_prompt_tokens: int
    max_tokens: int
    prefix_hashes: list[bytes]
    priority: int
    pools: bool
    may_reuse_prefix: bool = True


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=3):
    request_id: str
    condition: str


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """EngineCore.step() was called."""

    at: float


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=5):
    step_id: int
    digests: tuple[int, int, int, int]  # of PLAN_PARTS
    rows: list[int] | None  # None: those of the plan before
    starts: list[tuple[int, str]]  # rows that requests take, and their names
    # What grammars had found to be without alternative when this was planned: when they do is a matter of threads.
    forced: dict[str, Forced] = {}


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=6):
    step_id: int
    seconds: float
    token_ids: list[list[int]]  # of each row; redacted: as many zeros
    digests: dict[int, tuple[int, ...]]  # index of a row -> of RESULT_PARTS, for rows with any of these
    rolling: bytes  # hash of this result, its plan and all before


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    step_id: int
    error: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The engine was stopped; a trace without it ends in a crash, or is still being written."""


Record = Header | Took | TookRedacted | Ready | Begin | Planned | Finished | Failed | Ended

_encode = msgspec.msgpack.Encoder().encode


def plan_digests(plan: StepPlan) -> tuple[int, int, int, int]:
    """A digest of each of PLAN_PARTS."""
    starts = [plan.freed_rows, plan.starts] if plan.freed_rows or plan.starts else None
    blocks = [plan.block_rows, plan.block_groups, plan.block_indices, plan.block_ids] if plan.block_rows else None
    others = (plan.draft_token_ids, plan.mask_slots, plan.adapter_loads, plan.num_proposals)[
        : 4 if plan.num_proposals else 3
    ]
    return (
        crc32(_encode([plan.rows, plan.num_tokens])),
        crc32(_encode(starts)) if starts else 0,
        crc32(_encode(blocks)) if blocks else 0,
        crc32(_encode(others)) if any(others) else 0,
    )


def result_digests(result: StepResult) -> dict[int, tuple[int, ...]]:
    """For rows that have more than tokens, a digest of each of RESULT_PARTS; 0 where there is none."""
    parts: tuple[dict[int, Any], ...] = (
        *(result.logprobs, result.prompt_logprobs, result.errors, result.pooled),
        *(result.routed_experts, result.proposals),
    )
    if not any(parts):
        return {}
    rows = sorted(set().union(*parts))
    return {row: tuple(crc32(_encode(part[row])) if row in part else 0 for part in parts) for row in rows}


class RollingHash:
    """One hash over all plans and results; equal exactly if all of them are."""

    def __init__(self) -> None:
        self.value = bytes(8)

    def add(self, *content: object) -> bytes:
        self.value = blake2b(self.value + _encode(content), digest_size=8).digest()
        return self.value


def redacted_name(request_id: str, salt: bytes) -> str:
    return blake2b(request_id.encode(), key=salt, digest_size=8).hexdigest()


def redacted(request: EngineRequest, at: float, block_size: int, salt: bytes) -> TookRedacted:
    """What a plan of capacity needs of a request; equal prefixes have equal hashes, within one trace."""
    hashes: list[bytes] = []
    parent = blake2b(root_hash(request), key=salt, digest_size=8).digest()
    tokens = request.token_ids
    for begin in range(0, len(tokens) // block_size * block_size, block_size):
        parent = blake2b(parent + _encode(tokens[begin : begin + block_size]), key=salt, digest_size=8).digest()
        hashes.append(parent)
    given = request.num_given_outputs
    return TookRedacted(
        redacted_name(request.request_id, salt),
        at,
        len(tokens),
        len(tokens) - given,
        request.max_tokens,
        hashes,
        request.priority,
        isinstance(request.params, PoolingParams),
        may_reuse_prefix(request.params),
    )


def may_reuse_prefix(params: SamplingParams | PoolingParams) -> bool:
    """Whether a fresh request may start from a prefix hit; see Request.may_reuse_prefix."""
    if isinstance(params, PoolingParams):
        return params.pooling == "last"
    return params.prompt_logprobs is None and not params.return_routed_experts
