"""The collector's pause: nothing collected within, all counted as old after it, and garbage still found later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from quire.utils.collector import paused_collector, spared_heap


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    """Nothing is frozen, until all that was before is again."""
    gc.enable()
    gc.unfreeze()
    yield
    gc.freeze()
    gc.enable()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_within_and_little_right_after() -> None:
    before = collections()
    with paused_collector():
        kept = [[] for _ in range(100_000)]
        knot = weakref.ref(Knot())
    assert collections() == before
    assert knot() is not None
    assert gc.get_count()[0] < 1000, "the next allocation would have the collector walk over everything"
    assert len(gc.get_objects(generation=0)) < 1000
    gc.collect()
    assert knot() is None
    assert len(kept) == 100_000


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), paused_collector():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_turned_it_off_or_froze_objects_finds_that_unchanged() -> None:
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == pytest.approx(frozen, abs=100)


def test_only_what_is_made_in_a_batch_is_walked_over() -> None:
    old, young = weakref.ref(Knot()), None
    with spared_heap():
        young = weakref.ref(Knot())
        gc.collect()
        assert old() is not None
        assert young() is None
        with spared_heap():
            pass
        assert gc.get_freeze_count(), "the inner one let go of what the outer one spares"
    assert not gc.get_freeze_count()
    gc.collect()
    assert old() is None
