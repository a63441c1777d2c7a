"""Slots of adapters by rank: which one an adapter takes, and who leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from quire.sched.adapters import PATIENCE, AdapterSlots
from quire.sched.request import Request
from quire.types.request import AdapterRef


def asking(name: str, rank: int) -> Request:
    """All that slots look at."""
    adapter = AdapterRef(name, name, "", rank)
    return cast(Request, SimpleNamespace(engine_request=SimpleNamespace(adapter=adapter)))


def test_an_adapter_takes_the_smallest_slot_that_it_fits_into() -> None:
    slots = AdapterSlots(((8, 2), (64, 1)))  # slots 0 and 1, and 2
    first, large, second, third = asking("a", 8), asking("large", 33), asking("b", 4), asking("c", 8)
    assert slots.take(first)[0] == 0
    assert slots.take(large)[0] == 2
    assert slots.take(second)[0] == 1
    assert not slots.has_room(third), "all run"
    slots.give_back(large)
    slot, (load,) = slots.take(third)
    assert (slot, load.slot, load.digest) == (2, 2, "c"), "a larger one is better than none"
    slots.give_back(second)
    assert not slots.has_room(large), "its slot is in use, and the idle one is too small"


def test_the_least_recently_used_of_the_smallest_leaves() -> None:
    slots = AdapterSlots(((8, 2), (16, 1)))
    requests = [asking(name, 8) for name in "abc"]
    for request in requests:
        slots.take(request)
    for request in requests:
        slots.give_back(request)
    assert slots.take(asking("a", 8)) == (0, []), "it is still there, and now the one that was used last"
    slots.give_back(asking("a", 8))
    slot, _ = slots.take(asking("d", 2))
    assert slot == 1, "b's; c is in a larger slot"
    slot, _ = slots.take(asking("e", 16))
    assert slot == 2


def test_nothing_is_kept_of_adapters_that_have_left() -> None:
    slots = AdapterSlots(((8, 1),))
    for number in range(10):
        request = asking(str(number), 8)
        slots.take(request)
        slots.give_back(request)
    assert len(slots._resident) == 1
    assert not slots._running


def test_who_has_a_slot_passes_who_waits_for_one_but_not_for_ever() -> None:
    slots = AdapterSlots(((8, 1),))
    runs, waits, third = asking("a", 8), asking("b", 8), asking("c", 8)
    slots.take(runs)
    for step in range(3 * PATIENCE):
        slots.begin()
        assert not slots.may_start(waits)
        assert slots.may_start(asking("a", 8)) == (step < PATIENCE)
        assert not slots.may_start(third), "it needs a slot too, and came later"
    slots.give_back(runs)
    slots.begin()
    assert slots.may_start(waits)
    slots.take(waits)
    slots.begin()
    assert not slots.may_start(runs)
    assert slots.may_start(asking("b", 8)), "the next to wait begins anew"
