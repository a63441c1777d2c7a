"""Where experts go: every expert is somewhere, ranks have much the same to do, and little moves."""

from __future__ import annotations

from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from quire.utils.expert_placement import count_copies, place_experts, rank_loads, sources_of


@st.composite
def loads_of_ranks(draw: st.DrawFn, most: int = 24) -> tuple[list[int], int, int]:
    """Loads of experts, the number of slots, and of ranks."""
    ranks = draw(st.integers(1, 6))
    loads = draw(st.lists(st.integers(0, 1000) | st.sampled_from([0, 7, 100_000]), min_size=ranks, max_size=most))
    least = -(-len(loads) // ranks)
    share = draw(st.integers(least, min(len(loads), least + 3)))
    return loads, share * ranks, ranks


@given(loads_of_ranks())
def test_every_expert_is_somewhere_and_nowhere_twice(case: tuple[list[int], int, int]) -> None:
    loads, num_slots, ranks = case
    slots = place_experts(loads, num_slots, ranks)
    assert len(slots) == num_slots
    assert set(slots) == set(range(len(loads)))
    share = num_slots // ranks
    for rank in range(ranks):
        assert len(set(slots[rank * share : (rank + 1) * share])) == share


@given(loads_of_ranks())
def test_ranks_differ_by_no_more_than_copies_do(case: tuple[list[int], int, int]) -> None:
    """The bound of the module's docstring."""
    loads, num_slots, ranks = case
    copies = [load / count for load, count in zip(loads, count_copies(loads, num_slots, ranks), strict=True)]
    busy = rank_loads(loads, place_experts(loads, num_slots, ranks), ranks)
    assert max(busy) - min(busy) <= max(copies) - min(copies) + 1e-6 * (1 + max(copies))


@given(loads_of_ranks())
def test_copies_go_where_they_are_needed(case: tuple[list[int], int, int]) -> None:
    """No other number of copies has a smaller largest one: all others above it have as many as there are ranks."""
    loads, num_slots, ranks = case
    copies = count_copies(loads, num_slots, ranks)
    assert sum(copies) == num_slots
    assert all(1 <= count <= ranks for count in copies)
    largest = max((load / count for load, count in zip(loads, copies, strict=True) if count < ranks), default=0.0)
    for load, count in zip(loads, copies, strict=True):
        assert count == 1 or load / (count - 1) >= largest  # with one less it would be the largest


def best(loads: list[float], ranks: int) -> float:
    """The busiest rank under the best placement of single experts in equal numbers, by trying all."""
    if ranks == 1:
        return sum(loads)
    first, rest, share = loads[0], loads[1:], len(loads) // ranks
    found = inf
    for chosen in combinations(range(len(rest)), share - 1):
        mine = first + sum(rest[index] for index in chosen)
        if mine < found:
            others = [load for index, load in enumerate(rest) if index not in chosen]
            found = min(found, max(mine, best(others, ranks - 1)))
    return found


@given(st.integers(2, 3), st.integers(1, 3), st.data())
def test_small_cases_are_near_the_best(ranks: int, share: int, data: st.DataObject) -> None:
    """At most the largest difference between two experts above it, and never twice it."""
    size = ranks * share
    loads = data.draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    busiest = max(rank_loads(loads, place_experts(loads, size, ranks), ranks))
    optimum = best([*map(float, loads)], ranks)
    assert optimum <= busiest <= min(2 * optimum, optimum + max(loads) - min(loads)) + 1e-9


@given(loads_of_ranks(), st.data())
def test_what_can_stay_stays(case: tuple[list[int], int, int], data: st.DataObject) -> None:
    """The same load moves nothing, another one has sources for all that it moves, in the same rank if there."""
    loads, num_slots, ranks = case
    before = place_experts(loads, num_slots, ranks)
    assert place_experts(loads, num_slots, ranks, before) == before
    other = data.draw(st.permutations(loads))
    after = place_experts(other, num_slots, ranks, before)
    assert sorted(map(len, _by_rank(after, ranks))) == sorted(map(len, _by_rank(before, ranks)))
    busy, fresh = (max(rank_loads(other, slots, ranks)) for slots in (after, place_experts(other, num_slots, ranks)))
    assert abs(busy - fresh) <= 1e-6 * (1 + fresh)
    moves, share = sources_of(before, after, ranks), num_slots // ranks
    for slot, expert in enumerate(after):
        assert before[moves.get(slot, slot)] == expert
        held = before[slot // share * share : (slot // share + 1) * share]
        if slot in moves and expert in held:
            assert moves[slot] // share == slot // share


def _by_rank(slots: list[int], ranks: int) -> list[list[int]]:
    share = len(slots) // ranks
    return [slots[rank * share : (rank + 1) * share] for rank in range(ranks)]


def test_a_busy_expert_is_held_by_all() -> None:
    slots = place_experts([90, 10, 10, 10], 8, 4)
    assert slots.count(0) == 4
    assert max(rank_loads([90, 10, 10, 10], slots, 4)) < 1.2 * 120 / 4
