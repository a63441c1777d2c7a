"""Rows and batches for the sampling tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.base import Op
from quire.runner.sampling.logprobs import unpack_logprobs
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.types.sampling import SamplingParams
from quire.types.status import MESSAGES
from quire.types.step import RowStart, TokenLogprobs
from tests.runner.sampling.reference import Row

MAX_ROWS = 12
MAX_LENGTH = 40
CPU = torch.device("cpu")


@dataclass
class Rows:
    """The part of the worker's rows that sampling reads; unused places hold what no token is."""

    token_ids: Tensor
    num_tokens: Tensor
    num_prompt_tokens: Tensor
    num_computed: Tensor
    seeds: Tensor

    @property
    def scratch_row(self) -> int:
        return len(self.token_ids) - 1

    @classmethod
    def empty(cls, max_rows: int = MAX_ROWS, max_length: int = MAX_LENGTH, device: torch.device = CPU) -> Rows:
        numbers = [torch.zeros(max_rows + 1, dtype=torch.int64, device=device) for _ in range(4)]
        return cls(torch.full((max_rows + 1, max_length), -7, dtype=torch.int32, device=device), *numbers)

    def place(self, index: int, row: Row) -> None:
        tokens = row.prompt + row.outputs
        self.token_ids[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.num_tokens[index] = len(tokens)
        self.num_prompt_tokens[index] = len(row.prompt)
        self.seeds[index] = row.seed


def start_of(index: int, row: Row) -> RowStart:
    return RowStart(
        row=index,
        request_id=f"request-{index}",
        token_ids=row.prompt + row.outputs,
        num_prompt_tokens=len(row.prompt),
        num_computed_tokens=0,
        params=row.params,
        seed=row.seed,
        eos_token_ids=row.eos_token_ids,
    )


def make_row(*, outputs: list[int] | None = None, seed: int = 3, eos: tuple[int, ...] = (), **params: Any) -> Row:
    return Row(SamplingParams(**params), [1, 2, 3], outputs or [], seed, eos)


@dataclass
class Outcome:
    """What sampling gave to the rows of a batch."""

    kind: SamplingKind
    found: list[tuple[int, int]]  # token and status of each
    entries: dict[int, TokenLogprobs]

    def tokens(self) -> list[int]:
        return [token for token, _ in self.found]

    def errors(self) -> dict[int, str]:
        return {place: MESSAGES[code] for place, (_, code) in enumerate(self.found) if code}

    def logprobs(self) -> dict[int, TokenLogprobs]:
        return self.entries


def sample(sampler: Sampler, logits: Tensor, order: list[int], state: Rows, masked: bool = False) -> Outcome:
    """Sample logits [m, vocab_size] for these rows, as an eager step does; the state stays as it was."""
    kind = sampler.kind(order, masked)
    kept = [tensor.clone() for tensor in vars(state).values()]
    out = sampler.sample(kind, logits, torch.tensor(order, device=logits.device), state)
    for tensor, before in zip(vars(state).values(), kept, strict=True):
        tensor.copy_(before)
    wanted = sampler.wanted_logprobs(order)
    entries: dict[int, TokenLogprobs] = {}
    if wanted:
        places = list(wanted)
        packed = sampler.logprobs(logits[places], out[places, 0], max(wanted.values())).cpu()
        chosen = out[places, 0].tolist()
        entries = dict(zip(places, unpack_logprobs(packed, chosen, list(wanted.values())), strict=True))
    return Outcome(kind, [(token, code) for token, code in out.tolist()], entries)


def run(
    logits: np.ndarray, rows: list[Row], order: list[int] | None = None, sampler: Sampler | None = None
) -> Outcome:
    """Sample logits[i] for rows[i], the request sitting in worker row order[i]."""
    order = list(range(len(rows))) if order is None else order
    sampler = Sampler(logits.shape[1], MAX_ROWS, CPU) if sampler is None else sampler
    state = Rows.empty()
    for index, row in zip(order, rows, strict=True):
        state.place(index, row)
        sampler.add_request(index, start_of(index, row))
    sampler.apply_staged_writes()
    return sample(sampler, torch.tensor(logits, dtype=torch.float32), order, state)


def bind_references(monkeypatch: Any) -> None:
    """Have every op be its torch reference, as on a machine without kernels."""
    monkeypatch.setattr(Op, "bind", lambda op, target: op.reference)


def make_logits(seed: int, count: int, vocab_size: int) -> np.ndarray:
    """Logits with a good deal of ties: multiples of 1/8."""
    generator = np.random.default_rng(seed)
    return (np.round(generator.normal(size=(count, vocab_size)) * 24) / 8).astype(np.float32)


def rows_of(vocab_size: int) -> st.SearchStrategy[Row]:
    """Requests with any combination of parameters."""
    tokens = st.integers(0, vocab_size - 1)

    def often(default: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.just(default), other)

    params = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.7]),
            "top_k": often(0, st.integers(-1, vocab_size + 5)),
            "top_p": often(1.0, st.floats(0.01, 1.0)),
            "min_p": often(0.0, st.sampled_from([0.01, 0.1, 0.5, 1.0])),
            "presence_penalty": often(0.0, st.sampled_from([-2.0, 0.3, 1.5])),
            "frequency_penalty": often(0.0, st.sampled_from([-1.0, 0.7, 2.0])),
            "repetition_penalty": often(1.0, st.sampled_from([0.5, 1.3, 3.0])),
            "logit_bias": often(None, st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.25]), max_size=4)),
            "allowed_token_ids": often(None, st.lists(tokens, min_size=1, max_size=12)),
            "bad_words_token_ids": often(
                (), st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
            ),
            "min_tokens": st.integers(0, 8),
            "stop_token_ids": often((), st.lists(tokens, max_size=3)),
            "ignore_eos": st.booleans(),
            "logprobs": often(None, st.sampled_from([0, 1, 5, vocab_size + 3, -1])),
        }
    )
    return st.builds(
        Row,
        params.map(lambda values: SamplingParams(**values)),
        st.lists(tokens, min_size=1, max_size=8),
        st.lists(tokens, max_size=10),
        st.integers(-(2**63), 2**63 - 1),
        st.lists(tokens, max_size=2).map(tuple),
    )
