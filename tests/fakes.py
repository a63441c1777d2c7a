"""Fakes that run in microseconds: an executor that checks every plan and simulates what the KV cache holds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.kv.layout import KVGroup, KVLayout
from quire.sched.drafts import Drafter
from quire.sched.request import Request
from quire.types.masks import Masks
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import Pooled, RowStart, StepPlan, StepResult, TokenLogprobs

VOCAB_SIZE = 50


# The first token that a query at a position reads in a group with a window, by the group's kind; states are apart.
FIRST_READ: dict[str, Callable[[int, int], int]] = {
    "full": lambda position, window: 0,
    "latent": lambda position, window: 0,
    "sliding": lambda position, window: max(0, position - window + 1),
    "chunked": lambda position, window: position // window * window,
}


class FakeStepError(Exception):
    """A step that failed on purpose."""


def pooled_sum(token_ids: Sequence[int]) -> Pooled:
    """What the fake model pools: the sum of the tokens."""
    return Pooled(array("f", [float(sum(token_ids))]).tobytes(), (1,))


def next_token(token_ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> int:
    """The fake model: the next token is a function of all tokens before it."""
    return hash((0, *token_ids)) % vocab_size


def generate_alone(request: EngineRequest, max_model_len: int) -> tuple[list[int], str, int | None]:
    """What a request must give: new output tokens, finish reason, stop reason. Written without the scheduler."""
    params = request.params
    assert isinstance(params, SamplingParams)
    tokens = list(request.token_ids)
    outputs: list[int] = []
    while True:
        token = next_token(tokens)
        tokens.append(token)
        outputs.append(token)
        num_outputs = request.num_given_outputs + len(outputs)
        if num_outputs >= params.min_tokens:
            if token in params.stop_token_ids:
                return outputs, "stop", token
            if token in request.eos_token_ids and not params.ignore_eos:
                return outputs, "stop", None
        if num_outputs == request.max_tokens or len(tokens) == max_model_len:
            return outputs, "length", None


class FakeDrafter(Drafter):
    """Guesses a request's next tokens as if all that is in flight held; each guess is right with some probability."""

    name = "fake"
    default_tokens = 64

    def __init__(self, right: float, longest: int, seed: int) -> None:
        self._right, self._longest = right, longest
        self._draw = random.Random(seed)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        tokens = list(request.token_ids)
        for _ in range(num_in_flight + self._draw.randint(0, min(self._longest, limit))):
            tokens.append(next_token(tokens))
        drafts = tokens[len(request.token_ids) + num_in_flight :]
        return [token if self._draw.random() < self._right else self._wrong(token) for token in drafts]

    def _wrong(self, token: int) -> int:
        return (token + self._draw.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE


class ScriptedDrafter(Drafter):
    """Always proposes `drafts`, as many of them as it may."""

    name = "scripted"
    default_tokens = 64

    def __init__(self, *drafts: int) -> None:
        self.drafts = list(drafts)

    def propose(self, request: Request, num_in_flight: int, limit: int) -> list[int]:
        return self.drafts[:limit]


@dataclass
class FakeRow:
    start: RowStart
    token_ids: list[int]
    num_computed_tokens: int
    adapter: str | None  # what its slot holds


class FakeStep(Future[StepResult]):
    """A step of an executor without grammars."""

    def sample(self, masks: Future[Masks]) -> None:
        raise AssertionError("this fake has no grammars")


@dataclass
class FakeExecutor:
    """Runs plans in order, as a device would, and asserts everything a plan promises.

    The simulated KV of a token is the group and the hash of all tokens up to it, so a read finds out whether
    attention would see exactly the right tokens. A block of states holds the same hashes: a step reads that of the
    token before it, and leaves its own in the blocks that there are. Block tables keep their old entries when a row
    changes hands. Drafts stand behind a row's known tokens while a step runs; what they wrote stays in the cache when
    they do not hold.
    """

    layout: KVLayout
    num_blocks: int | Sequence[int]  # of each pool
    max_num_seqs: int
    first_read: Mapping[str, Callable[[int, int], int]] = field(default_factory=lambda: FIRST_READ)
    rows: dict[int, FakeRow] = field(default_factory=dict)
    num_steps: int = 0
    poisoned: frozenset[str] = frozenset()  # requests that make their step fail
    stalling: float = 0.0  # probability that a row that was to sample gives no token
    max_rows_seen: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    adapters: dict[str, str] = field(default_factory=dict)  # request -> digest of its adapter
    slots: dict[int, str] = field(default_factory=dict)  # slot -> digest of the adapter in it

    def __post_init__(self) -> None:
        self.pool_blocks = [self.num_blocks] if isinstance(self.num_blocks, int) else self.num_blocks
        self.tables: list[list[dict[int, int]]] = [[{} for _ in self.layout.groups] for _ in range(self.max_num_seqs)]
        self.memory: dict[tuple[int, int, int], tuple[int, int]] = {}  # (pool, block, offset) -> (group, prefix hash)
        self.last_step_id = -1
        self._draw = random.Random(0)

    def execute(self, plan: StepPlan, *, fail: bool = False, apply_before_failing: bool = False) -> StepResult:
        if fail and not apply_before_failing:
            raise FakeStepError("failed before it began")
        assert plan.step_id > self.last_step_id
        self.last_step_id = plan.step_id
        self.num_steps += 1
        self._apply_changes(plan)
        assert plan.rows, "an empty step"
        assert len(set(plan.rows)) == len(plan.rows) == len(plan.num_tokens)
        self.max_rows_seen = max(self.max_rows_seen, len(plan.rows))
        assert set(plan.draft_token_ids) <= set(plan.rows)
        self._write(plan)
        if fail or any(self.rows[row].start.request_id in self.poisoned for row in plan.rows):
            raise FakeStepError("failed after the KV was written")
        result = StepResult(plan.step_id, [])
        for index, (row, count) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            result.token_ids.append(self._run_row(result, index, row, count, plan.draft_token_ids.get(row, [])))
        for index, row in enumerate(plan.rows):
            if row in plan.num_proposals and result.token_ids[index]:
                result.proposals[index] = self._propose(row, plan.num_proposals[row])
        return result

    def _propose(self, row: int, count: int) -> list[int]:
        """As a draft model would: right most of the time, and only where the row has blocks."""
        tokens = list(self.rows[row].token_ids)
        end = len(tokens) - 1 + count
        for table in self.tables[row]:
            assert all(index in table for index in range(-(-end // self.layout.block_size))), "a draft has no block"
        for _ in range(count):
            tokens.append(next_token(tokens) if self._draw.random() < 0.8 else 41)
        return tokens[-count:]

    def _apply_changes(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.rows.pop(row, None)  # after a failed step a row may be freed that was never started
        for load in plan.adapter_loads:
            assert all(row.start.adapter_slot != load.slot for row in self.rows.values()), "a slot changes in use"
            self.slots[load.slot] = load.digest
        for start in plan.starts:
            adapter = self.slots[start.adapter_slot] if start.adapter_slot >= 0 else None
            assert adapter == self.adapters.get(start.request_id), "a request runs with a wrong adapter"
            assert start.row not in self.rows, f"row {start.row} has an owner"
            assert start.row in plan.rows, "a row starts in a step it is not part of"
            assert 0 <= start.num_computed_tokens < len(start.token_ids)
            self.rows[start.row] = FakeRow(start, list(start.token_ids), start.num_computed_tokens, adapter)
        columns = (plan.block_rows, plan.block_groups, plan.block_indices, plan.block_ids)
        for row, group, index, block in zip(*columns, strict=True):
            assert row in plan.rows, "a block table changes of a row that does not run"
            assert 0 <= block < self.pool_blocks[self.layout.groups[group].pool]
            self.tables[row][group][index] = block

    def _write(self, plan: StepPlan) -> None:
        """Write the KV of all rows' tokens."""
        size = self.layout.block_size
        writers: dict[tuple[int, int], tuple[int, int]] = {}
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            state = self.rows[row]
            drafts = plan.draft_token_ids.get(row, [])
            tokens = state.token_ids + drafts
            begin, end = state.num_computed_tokens, state.num_computed_tokens + count
            assert count >= 1 + len(drafts)
            assert end <= len(tokens), "more tokens are planned than the row has"
            assert end == len(tokens) or not drafts, "a row verifies drafts before it has caught up"
            hashes = _prefix_hashes(tokens[:end], state.adapter)
            for group in self.layout.groups:
                if group.kind == "state":
                    self._check_state(row, group, begin, hashes)
                table = self.tables[row][group.index]
                for position in range(begin, end):
                    block = table[position // size]
                    if group.kind == "state" and block == 0 and position < end - 1:
                        continue
                    assert block != 0, f"row {row} would write position {position} to the null block"
                    assert writers.setdefault((group.pool, block), (row, group.index)) == (row, group.index)
                    self.memory[group.pool, block, position % size] = (group.index, hashes[position])

    def _check_state(self, row: int, group: KVGroup, begin: int, hashes: Sequence[int]) -> None:
        """The state that a step at `begin` goes on from is that of all tokens before."""
        if begin == 0:
            return
        entry, offset = divmod(begin - 1, self.layout.block_size)
        block = self.tables[row][group.index][entry]
        assert self.memory.get((group.pool, block, offset)) == (group.index, hashes[begin - 1]), (
            f"row {row} goes on from a wrong state at {begin} of group {group.index}, block {block}"
        )

    def _run_row(self, result: StepResult, index: int, row: int, count: int, drafts: list[int]) -> list[int]:
        """Read what attention would read, then sample if the row caught up, and advance it by what holds."""
        state = self.rows[row]
        begin, end = state.num_computed_tokens, state.num_computed_tokens + count
        hashes = _prefix_hashes((state.token_ids + drafts)[:end], state.adapter)
        size = self.layout.block_size
        for group in self.layout.groups:
            if group.kind == "state":
                continue
            for position in range(self.first_read[group.kind](begin, group.window or 0), end):
                block = self.tables[row][group.index][position // size]
                expected = (group.index, hashes[position])
                assert self.memory.get((group.pool, block, position % size)) == expected, (
                    f"row {row} reads wrong KV at position {position} of group {group.index}, block {block}"
                )
        state.num_computed_tokens = end
        params = state.start.params
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            last = min(end, state.start.num_prompt_tokens - 1)
            if last > begin:
                result.prompt_logprobs[index] = [
                    TokenLogprobs([state.token_ids[position + 1]], [-1.0], 1) for position in range(begin, last)
                ]
        if end < len(state.token_ids):
            return []
        if isinstance(params, PoolingParams):
            result.pooled[index] = pooled_sum(state.token_ids)
            return []
        tokens = [] if self._draw.random() < self.stalling else self._sample(state, drafts)
        if params.logprobs is not None:
            result.logprobs[index] = [TokenLogprobs([token], [-0.5], 1) for token in tokens]
        state.token_ids += tokens
        state.num_computed_tokens = len(state.token_ids) - 1
        return tokens

    def _sample(self, state: FakeRow, drafts: list[int]) -> list[int]:
        """The drafts that hold, and one token more."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            tokens.append(next_token(state.token_ids + tokens))
            if draft != tokens[-1]:
                break
        self.num_drafts += len(drafts)
        self.num_accepted += len(tokens) - 1
        return tokens


def _prefix_hashes(token_ids: Sequence[int], adapter: str | None) -> list[int]:
    hashes: list[int] = []
    value = hash(adapter)
    for token in token_ids:
        value = hash((value, token))
        hashes.append(value)
    return hashes
