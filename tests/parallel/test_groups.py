from __future__ import annotations

import pytest
import torch

from quire.parallel.groups import ParallelGroup
from quire.types.errors import ConfigError


def test_a_group_of_one_moves_nothing() -> None:
    group, x = ParallelGroup(), torch.ones(2, 3)
    assert group.collectives.all_reduce(x) is x
    assert group.collectives.all_gather(x, 3) is x
    assert group.collectives.minimum([3, 4]) == [3, 4]


def test_slices_cover_the_whole_without_overlap() -> None:
    slices = [ParallelGroup(rank, 4).slice_of(12, "heads") for rank in range(4)]
    assert [index for start, size in slices for index in range(start, start + size)] == list(range(12))


def test_a_share_that_is_not_whole_names_what_and_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"attention heads \(9\) cannot be split over 2 ranks.*divides 9"):
        ParallelGroup(0, 2).slice_of(9, "attention heads")


def test_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        ParallelGroup(2, 2)


@pytest.mark.parametrize(("total", "size"), [(199, 2), (199, 4), (7, 3), (8, 8)])
def test_shares_that_are_not_whole_cover_it_too(total: int, size: int) -> None:
    shares = [ParallelGroup(rank, size).share_of(total, "vocabulary") for rank in range(size)]
    assert [index for start, count in shares for index in range(start, start + count)] == list(range(total))


def test_no_rank_goes_without() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary \(5\) is too small for 4 ranks"):
        ParallelGroup(0, 4).share_of(5, "vocabulary")
