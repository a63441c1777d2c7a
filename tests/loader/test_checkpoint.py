from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.loader.checkpoint import natural_key


def test_numbers_sort_as_numbers() -> None:
    names = ["model.layers.10.a", "model.layers.2.b", "lm_head", "model.layers.2.a", "model.norm"]
    assert sorted(names, key=natural_key) == [
        "lm_head",
        "model.layers.2.a",
        "model.layers.2.b",
        "model.layers.10.a",
        "model.norm",
    ]


@given(st.lists(st.text(alphabet="ab.019", max_size=8)))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(sorted(names, key=natural_key)) == sorted(names)
