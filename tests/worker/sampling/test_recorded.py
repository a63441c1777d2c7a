"""The sampling of recorded steps, in Triton's interpreter or on a GPU, against the sampler that the host drives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.ops.base import Implementation, Target
from quire.types.sampling import SamplingParams
from quire.worker.request_rows import RequestRows
from quire.worker.sampling.base import SampleRows
from quire.worker.sampling.logprobs import unpack_logprobs
from quire.worker.sampling.mask_buffer import mask_words
from quire.worker.sampling.sampler import RecordedKind, Sampler
from tests.kernels.device import DEVICE
from tests.kernels.triton.paged import needs_triton
from tests.worker.sampling.helpers import make_logits, make_row, rows_of, start_of
from tests.worker.sampling.reference import Row

pytestmark = needs_triton
MAX_ROWS, MAX_LENGTH = 6, 40


class Kernel:
    """An op where it has a kernel."""

    reference = None

    def __init__(self, path: str) -> None:
        self._implementation = Implementation("triton", path, ("cpu", "cuda"))

    def bind(self, target: Target) -> object:
        return self._implementation.load()


def make_sampler(vocab_size: int) -> Sampler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.worker.sampling.sampler.DRAW_WITHIN", Kernel("triton.sampling:draw_within"))
        patch.setattr("quire.worker.sampling.sampler.KEEP_ALLOWED", Kernel("triton.shaping:keep_allowed"))
        patch.setattr("quire.worker.sampling.sampler.LOGPROBS", Kernel("triton.logprobs:logprobs"))
        return Sampler(vocab_size, MAX_ROWS, DEVICE)


def masks_of(allowed: list[list[int]], vocab_size: int) -> np.ndarray:
    masks = np.zeros((len(allowed), mask_words(vocab_size)), dtype=np.int32)
    for mask, tokens in zip(masks.view(np.uint32), allowed, strict=True):
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return masks


class Both:
    """Requests in rows, sampled from the host and then by the kernels of a recorded step."""

    def __init__(self, rows: list[Row], order: list[int], logits: np.ndarray) -> None:
        self.order, self.logits = order, torch.tensor(logits, dtype=torch.float32, device=DEVICE)
        self.state = RequestRows(MAX_ROWS, MAX_LENGTH, DEVICE)
        self.sampler = make_sampler(logits.shape[1])
        for index, row in zip(order, rows, strict=True):
            start = start_of(index, row)
            start.num_computed_tokens = len(start.token_ids) - 1
            self.state.start(start)
            self.sampler.add_request(index, start)
        self.state.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def compare(self, masked: dict[int, list[int]] | None = None) -> RecordedKind | None:
        """`masked`: the tokens that a grammar allows to these rows. Returns the kind of recorded step, if any."""
        from quire.worker.sampling.recorded import sample_step

        sampler, state, order = self.sampler, self.state, self.order
        if masked:
            masks = masks_of(list(masked.values()), self.logits.shape[1])
            sampler.masks.load(masked, masks)
        rows = torch.tensor(order, device=DEVICE)
        expected = sampler.sample(self.logits.clone(), SampleRows(rows, order), state)
        sampler.masks.clear()
        kind = sampler.recorded_kind(order, bool(masked))
        if kind is None:
            return None
        before = state.num_tokens.clone()
        padded = torch.cat([rows, torch.tensor([state.scratch_row], device=DEVICE)])
        logits = torch.cat([self.logits, self.logits[:1]])
        kept = logits.clone()
        found = sample_step(kind, sampler, logits, padded, state)[:, :-1]
        same = torch.equal(logits.view(torch.int32), kept.view(torch.int32))
        assert same, "the logits of the forward pass stay as they are"
        assert found[1].tolist() == expected.status.tolist()
        sound = found[1] == 0
        assert found[0][sound].tolist() == expected.token_ids[sound].tolist()
        counts = sampler.wanted_logprobs(order)
        if bool(sound.all()) and counts:
            entries = unpack_logprobs(found[0].tolist(), found[2:].cpu(), counts)
            assert entries == expected.logprobs(), "equal to the bit"
        assert (state.num_tokens - before)[rows].tolist() == [1] * len(order)
        assert state.token_ids[rows, before[rows]].tolist() == found[0].tolist()
        return kind


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
def test_any_rows_as_from_the_host(batch: tuple[list[Row], list[int], np.ndarray, dict[int, list[int]]]) -> None:
    rows, order, logits, masked = batch
    Both(rows, order, logits).compare(masked)


SHAPING: list[tuple[dict[str, Any], RecordedKind]] = [
    ({}, RecordedKind()),
    ({"temperature": 0.0}, RecordedKind()),
    ({"temperature": 0.8, "top_p": 0.9}, RecordedKind(draws=True)),
    ({"allowed_token_ids": [3, 31, 32, 64]}, RecordedKind(draws=True, shapes=True)),
    ({"logit_bias": {4: 9.0, 63: -9.0}}, RecordedKind(draws=True, shapes=True)),
    ({"bad_words_token_ids": ((5,), (1, 2, 9), (2, 8)), "outputs": [1, 2]}, RecordedKind(draws=True, shapes=True)),
    ({"min_tokens": 3, "stop_token_ids": [7], "eos": (8,)}, RecordedKind(draws=True, shapes=True)),
    ({"logit_bias": {5: 50.0}, "bad_words_token_ids": ((5,),)}, RecordedKind(draws=True, shapes=True)),
    ({"repetition_penalty": 1.7, "outputs": [5, 5, 9]}, RecordedKind(draws=True, shapes=True)),
    (
        {"frequency_penalty": 0.7, "presence_penalty": -0.3, "outputs": [5, 5, 9]},
        RecordedKind(draws=True, shapes=True),
    ),
    ({"logprobs": 0}, RecordedKind(draws=True, logprobs=0)),
    ({"logprobs": 3, "temperature": 0.9}, RecordedKind(draws=True, logprobs=5)),
]


@pytest.mark.parametrize(
    ("wanted", "kind"), SHAPING, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("masked", [False, True])
def test_each_feature_beside_a_plain_row(wanted: dict[str, Any], kind: RecordedKind, masked: bool) -> None:
    params = {"temperature": 0.0, **wanted}
    logits = make_logits(1, 2, 5000)
    both = Both([make_row(temperature=0.0), make_row(**params)], [4, 1], logits)
    masks = {1: [2, 4, 5, 8, 9, 4999]} if masked else None
    assert both.compare(masks) == (kind._replace(draws=True, masked=True) if masked else kind)


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
    both.sampler.remove_request(2)
    both.state.free(2)
    other = start_of(2, make_row(temperature=0.7))
    both.state.start(other)
    both.sampler.add_request(2, other)
    both.state.apply_staged_writes()
    both.sampler.apply_staged_writes()
    everything = RecordedKind(draws=True, shapes=True)
    assert both.compare() == everything
    assert both.compare({0: [4]}) == everything._replace(masked=True)


def test_what_does_not_fit_is_left_to_the_host() -> None:
    many = dict.fromkeys(range(600), 1.0)
    long_word = (tuple(range(9)),)
    for params in ({"logit_bias": many}, {"bad_words_token_ids": long_word}, {"logprobs": 21}):
        both = Both([make_row(temperature=0.0, **params)], [0], make_logits(3, 1, 700))
        assert both.compare() is None


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
    found = both.sampler.sample(
        both.logits.clone(), SampleRows(torch.tensor([3, 0], device=DEVICE), [3, 0]), both.state
    )
    assert found.status.tolist() == [code, 0]
    assert both.compare() is not None


def test_params_are_neutral_by_default() -> None:
    """A plain greedy row must never be given to a step that shapes."""
    both = Both([Row(SamplingParams(temperature=0.0), [1], [], 0)], [0], make_logits(5, 1, 40))
    assert both.compare() == RecordedKind()
