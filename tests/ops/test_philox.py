from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.philox import philox4x32

WORDS = st.integers(0, 2**32 - 1)


def numpy_philox(counter: list[np.ndarray], key: list[np.ndarray]) -> list[np.ndarray]:
    """The generator again, on unsigned NumPy integers."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for round_index in range(10):
        if round_index:
            k0 = (k0 + np.uint64(0x9E3779B9)) & low
            k1 = (k1 + np.uint64(0xBB67AE85)) & low
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        high0, low0 = product0 >> np.uint64(32), product0 & low
        high1, low1 = product1 >> np.uint64(32), product1 & low
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def torch_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert torch_philox(counter, key) == expected
    assert [int(word) for word in numpy_philox(counter, key)] == expected


@given(st.lists(WORDS, min_size=4, max_size=4), st.lists(WORDS, min_size=2, max_size=2))
def test_agrees_with_unsigned_arithmetic(counter: list[int], key: list[int]) -> None:
    assert torch_philox(counter, key) == [int(word) for word in numpy_philox(counter, key)]


def test_broadcasting_words_changes_nothing() -> None:
    blocks = torch.arange(50).unsqueeze(0)
    rows = torch.tensor([[7], [2**32 - 1], [123456789]])
    constant = torch.tensor([[5]])
    broadcast = philox4x32((blocks, rows, constant, constant), (rows, constant))
    full = [word.expand(3, 50).contiguous() for word in (blocks, rows, constant, constant, rows, constant)]
    dense = philox4x32((full[0], full[1], full[2], full[3]), (full[4], full[5]))
    for one, other in zip(broadcast, dense, strict=True):
        assert one.shape == (3, 50)
        assert torch.equal(one, other)
        assert int(one.min()) >= 0
        assert int(one.max()) < 2**32
