"""Rows and batches for the sampling tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from quire.types.sampling import SamplingParams
from quire.types.step import RowStart
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.sampler import SampleOutput, Sampler
from tests.worker.sampling.reference import Row

MAX_ROWS = 12
MAX_LENGTH = 40
CPU = torch.device("cpu")


@dataclass
class Rows:
    """The part of the worker's rows that sampling reads; unused places hold what no token is."""

    token_ids: Tensor
    num_tokens: Tensor
    num_prompt_tokens: Tensor
    seeds: Tensor

    @classmethod
    def empty(cls, max_rows: int = MAX_ROWS, max_length: int = MAX_LENGTH) -> Rows:
        numbers = [torch.zeros(max_rows, dtype=torch.int64) for _ in range(3)]
        return cls(torch.full((max_rows, max_length), -7, dtype=torch.int32), *numbers)

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


def run(
    logits: np.ndarray, rows: list[Row], order: list[int] | None = None, sampler: Sampler | None = None
) -> SampleOutput:
    """Sample logits[i] for rows[i], the request sitting in worker row order[i]."""
    order = list(range(len(rows))) if order is None else order
    sampler = Sampler(logits.shape[1], MAX_ROWS, CPU) if sampler is None else sampler
    state = Rows.empty()
    for index, row in zip(order, rows, strict=True):
        state.place(index, row)
        sampler.add_request(index, start_of(index, row))
    sampler.apply_staged_writes()
    return sampler.sample(torch.tensor(logits, dtype=torch.float32), SampleRows(torch.tensor(order), order), state)


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
