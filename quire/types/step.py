"""StepPlan and StepResult: what the scheduler tells the worker, and what the worker answers.

A plan carries only what changed since the last one; the worker's permanent rows hold the rest. Both types
are msgspec structs, so an executor may send them to another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from quire.types.request import PromptEmbeds
from quire.types.sampling import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.types.masks import Masks


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: at admission, and again when it resumes after preemption."""

    row: int
    request_id: str
    token_ids: list[int]  # every known token: the prompt, then outputs generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int  # KV already in blocks, from a prefix hit
    params: SamplingParams | PoolingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    prompt_embeds: PromptEmbeds | None = None  # in place of the embeddings of the prompt's tokens
    adapter_slot: int = -1  # of its LoRA adapter; -1: none


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """An adapter, which the worker has in host memory, goes into a slot."""

    slot: int
    digest: str


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step of the model. Columns are parallel lists; `rows` is in batch order.

    A row samples in this step exactly when its computed tokens catch up with its known tokens: at the last known one
    and at each of its drafts, so at 1 + d positions. The worker applies, in this order: frees, starts, block deltas,
    then runs the rows. Where a row stands is the worker's to know: while results are in flight, the scheduler has
    planned for the most tokens that may hold.
    """

    step_id: int
    rows: list[int]
    num_tokens: list[int]  # parallel to rows: how many tokens this row computes in this step, its drafts among them
    freed_rows: list[int] = []
    starts: list[RowStart] = []
    # Block-table delta, packed: row block_rows[i], KV group block_groups[i], entry block_indices[i] becomes
    # block block_ids[i]. Block 0 is the null block.
    block_rows: list[int] = []
    block_groups: list[int] = []
    block_indices: list[int] = []
    block_ids: list[int] = []
    # row -> tokens to verify. They stand behind the row's known tokens; one holds exactly if it is the token that the
    # row samples there, and all before it hold.
    draft_token_ids: dict[int, list[int]] = {}
    mask_slots: dict[int, int] = {}  # row -> line of its first sample position among the step's grammar masks
    adapter_loads: list[AdapterLoad] = []  # before the starts; no row that runs has one of these slots
    # row -> number of tokens that the worker's drafter is to propose once the row has sampled; they have blocks.
    num_proposals: dict[int, int] = {}


class MaskedRow(NamedTuple):
    """A row that samples under a grammar: it takes a mask for its next token, and for the one after each draft."""

    request_id: str
    draft_token_ids: Sequence[int] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the chosen (or prompt) token, the top ones, and those asked for by id."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the chosen token, 1 is the greedy one
    asked_ranks: list[int] = []  # of the last tokens, which the request asked for by id


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """What was read of a request's hidden states: float32 values in the machine's byte order."""

    data: bytes
    shape: tuple[int, ...]  # [size] of one vector, [num_tokens, size] of one for each token


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """Which experts some consecutive tokens of a request went to, in each layer that has experts."""

    position: int  # of the first token in its sequence
    data: bytes  # int16 in the machine's byte order
    shape: tuple[int, ...]  # [num_tokens, layers, experts of a token]


class Returned(msgspec.Struct, frozen=True, array_like=True):
    """What stages of a pipeline that do not sample have to know of a step's result."""

    step_id: int
    token_ids: list[list[int]]  # as in StepResult
    broken: list[int]  # indices into the plan's rows of those that failed


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced; `token_ids` is parallel to the plan's rows, [] where nothing was sampled.

    A row with d drafts gives those that hold and one token more, at most 1 + d in all; it advances by what it gives.
    A row that was to sample and gives nothing stays at its last known token, which it computes again.
    """

    step_id: int
    token_ids: list[list[int]]
    # Sparse columns, keyed by index into the plan's rows.
    logprobs: dict[int, list[TokenLogprobs]] = {}  # an entry per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    errors: dict[int, str] = {}
    pooled: dict[int, Pooled] = {}  # of rows whose prompts are computed
    routed_experts: dict[int, RoutedExperts] = {}
    way: str = ""  # how it ran, by the name of its way
    proposals: dict[int, list[int]] = {}  # what the worker's drafter says may follow, as num_proposals asks
    expert_load: dict[int, list[int]] = {}  # at times, by layer: tokens that came to each expert since the last time
    captured: bool = False  # a part of it was captured first: its time says nothing of other steps


class StartedStep(Protocol):
    """A step that may still be running."""

    def sample(self, masks: Future[Masks]) -> None:
        """Give a step the masks that it waits for, as its mask_slots tell, a line per sample position.

        May block until they are there; never raises.
        """

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Why it failed, if it did. Waits for the step."""

    def result(self) -> StepResult:
        """Waits for the step, and raises its exception."""
