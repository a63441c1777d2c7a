"""Sampling by Triton kernels, in the interpreter or on a GPU, against the torch references of the same ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.ops.base import Op, Target
from quire.runner.sampling.mask_buffer import mask_words
from quire.runner.sampling.sampler import Sampler, SamplingKind
from quire.types.sampling import SamplingParams
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.runner.sampling.helpers import Rows, make_logits, make_row, rows_of, sample, start_of
from tests.runner.sampling.reference import Row

pytestmark = needs_triton
MAX_ROWS, MAX_LENGTH = 6, 40
SHAPED = SamplingKind(groups=frozenset({"shaping"}))


def triton_ops(op: Op[Any], target: Target) -> Any:
    """The Triton kernel of an op, in the interpreter or on a GPU."""
    for implementation in op.implementations:
        if implementation.name == "triton":
            return implementation.load()
    return op.reference


def make_sampler(vocab_size: int, *, kernels: bool) -> Sampler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "bind", triton_ops if kernels else lambda op, target: op.reference)
        return Sampler(vocab_size, MAX_ROWS, DEVICE)


def masks_of(allowed: list[list[int]], vocab_size: int) -> np.ndarray:
    masks = np.zeros((len(allowed), mask_words(vocab_size)), dtype=np.int32)
    for mask, tokens in zip(masks.view(np.uint32), allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return masks


class Both:
    """Requests in rows, sampled by torch references and then by Triton kernels."""

    def __init__(self, rows: list[Row], order: list[int], logits: np.ndarray) -> None:
        self.order, self.logits = order, torch.tensor(logits, dtype=torch.float32, device=DEVICE)
        self.state = Rows.empty(MAX_ROWS, MAX_LENGTH, DEVICE)
        self.samplers = [make_sampler(logits.shape[1], kernels=kernels) for kernels in (False, True)]
        for index, row in zip(order, rows, strict=True):
            self.place(index, row)

    def place(self, index: int, row: Row) -> None:
        self.state.place(index, row)
        for sampler in self.samplers:
            sampler.remove_request(index)
            sampler.add_request(index, start_of(index, row))
            sampler.apply_staged_writes()

    def compare(self, masked: dict[int, list[int]] | None = None) -> SamplingKind:
        """`masked`: the tokens that a grammar allows to these rows. Returns the kind of sampling."""
        if masked:
            for sampler in self.samplers:
                lines = {row: line for line, row in enumerate(masked)}
                sampler.masks.load(lines, masks_of(list(masked.values()), self.logits.shape[1]))
        kept = self.logits.clone()
        expected, found = (
            sample(sampler, self.logits, self.order, self.state, bool(masked)) for sampler in self.samplers
        )
        same = torch.equal(self.logits.view(torch.int32), kept.view(torch.int32))
        assert same, "the logits of the forward pass stay as they are"
        assert [code for _, code in found.found] == [code for _, code in expected.found]
        for (token, code), (wanted, _) in zip(found.found, expected.found, strict=True):
            assert code or token == wanted
        if not found.errors():
            assert found.entries.keys() == expected.entries.keys()
            for place, entry in found.entries.items():
                assert (entry.token_ids, entry.rank) == (
                    expected.entries[place].token_ids,
                    expected.entries[place].rank,
                )
                assert entry.logprobs == pytest.approx(expected.entries[place].logprobs, abs=1e-5)
        return found.kind


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Row], list[int], np.ndarray, dict[int, list[int]]]:
    vocab_size = draw(st.sampled_from([33, 90]))
    rows = draw(st.lists(rows_of(vocab_size), min_size=1, max_size=4))
    order = draw(st.permutations(range(MAX_ROWS)))[: len(rows)]
    logits = make_logits(draw(st.integers(0, 1000)), len(rows), vocab_size)
    tokens = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=vocab_size)
    return rows, order, logits, {row: draw(tokens) for row in order if draw(st.booleans())}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_any_rows(batch: tuple[list[Row], list[int], np.ndarray, dict[int, list[int]]]) -> None:
    rows, order, logits, masked = batch
    Both(rows, order, logits).compare(masked)


SHAPING: list[tuple[dict[str, Any], SamplingKind]] = [
    ({}, SamplingKind()),
    ({"temperature": 0.0}, SamplingKind()),
    ({"temperature": 0.8, "top_p": 0.9}, SamplingKind(greedy=False)),
    ({"allowed_token_ids": [3, 31, 32, 64]}, SHAPED),
    ({"logit_bias": {4: 9.0, 63: -9.0}}, SHAPED),
    ({"bad_words_token_ids": ((5,), (1, 2, 9), (2, 8)), "outputs": [1, 2]}, SHAPED),
    ({"min_tokens": 3, "stop_token_ids": [7], "eos": (8,)}, SHAPED),
    ({"logit_bias": {5: 50.0}, "bad_words_token_ids": ((5,),)}, SHAPED),
    ({"repetition_penalty": 1.7, "outputs": [5, 5, 9]}, SHAPED),
    (
        {"frequency_penalty": 0.7, "presence_penalty": -0.3, "outputs": [5, 5, 9]},
        SHAPED,
    ),
    ({"logprobs": 0}, SamplingKind(logprobs=0)),
    ({"logprobs": 3, "temperature": 0.9}, SamplingKind(greedy=False, logprobs=5)),
]


@pytest.mark.parametrize(
    ("wanted", "kind"), SHAPING, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("masked", [False, True])
def test_each_feature_beside_a_plain_row(wanted: dict[str, Any], kind: SamplingKind, masked: bool) -> None:
    params = {"temperature": 0.0, **wanted}
    logits = make_logits(1, 2, 5000)
    both = Both([make_row(temperature=0.0), make_row(**params)], [4, 1], logits)
    masks = {1: [2, 4, 5, 8, 9, 4999]} if masked else None
    assert both.compare(masks) == kind._replace(masked=masked)


def test_nothing_is_left_of_a_rows_first_owner() -> None:
    """Also beside a row that asks for all of it."""
    logits = make_logits(2, 2, 64)
    first = make_row(
        temperature=0.0,
        logit_bias={3: 90.0},
        allowed_token_ids=[3, 4],
        repetition_penalty=2.0,
        min_tokens=9,
        eos=(4,),
    )
    both = Both([first, first], [2, 0], logits)
    both.compare({2: [3], 0: [3, 4]})
    both.place(2, make_row(temperature=0.7))
    everything = SHAPED._replace(greedy=False)
    assert both.compare() == everything
    assert both.compare({0: [4]}) == everything._replace(masked=True)


def test_what_does_not_fit_is_sampled_eagerly() -> None:
    many = dict.fromkeys(range(600), 1.0)
    long_word = (tuple(range(9)),)
    for params in ({"logit_bias": many}, {"bad_words_token_ids": long_word}, {"logprobs": 21}):
        both = Both([make_row(temperature=0.0, **params)], [0], make_logits(3, 1, 700))
        assert both.compare().eager


@pytest.mark.parametrize(
    ("params", "value", "code"),
    [
        ({"allowed_token_ids": [3], "bad_words_token_ids": ((3,),)}, 0.0, 2),
        ({"repetition_penalty": 1e-6, "outputs": [3]}, 3e38, 3),
        ({"logit_bias": {3: 1.0}}, float("nan"), 1),
        ({"logit_bias": {3: 1.0}}, float("inf"), 1),
    ],
)
def test_rows_without_a_token_say_why(params: dict[str, Any], value: float, code: int) -> None:
    logits = make_logits(4, 2, 50)
    logits[0, 3] = value
    both = Both([make_row(temperature=0.0, **params), make_row(temperature=0.0)], [3, 0], logits)
    both.compare()
    assert [found for _, found in sample(both.samplers[1], both.logits, [3, 0], both.state).found] == [code, 0]


def test_params_are_neutral_by_default() -> None:
    """A plain greedy row must never be given to a step that shapes."""
    both = Both([Row(SamplingParams(temperature=0.0), [1], [], 0)], [0], make_logits(5, 1, 40))
    assert both.compare() == SamplingKind()
