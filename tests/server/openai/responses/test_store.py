"""The store in memory: it never holds more than it may, and what was used longest ago goes first."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from quire.server.openai.responses.protocol import Response
from quire.server.openai.responses.store import MemoryStore, StoredResponse


def stored(number: int, size: int = 0) -> StoredResponse:
    response = Response(id=f"resp_{number}", created_at=0, status="completed", model="m", text={})
    return StoredResponse(response, [], [{"role": "user", "content": "x" * size}])


ACTIONS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 5), st.integers(0, 2000)))


@given(ACTIONS, st.integers(0, 4), st.integers(0, 6000))
def test_any_use_stays_within_the_limits(actions: list[tuple[str, int, int]], most: int, max_bytes: int) -> None:
    store = MemoryStore(most, max_bytes)
    order: list[str] = []  # the one used longest ago first
    for action, number, size in actions:
        name = f"resp_{number}"
        if action == "put":
            store.put(stored(number, size))
            order = [other for other in order if other != name]
            order += [name] if store.peek(name) is not None else []
        elif action == "get":
            found = store.get(name)
            if found is not None:
                order = [other for other in order if other != name] + [name]
        else:
            assert store.delete(name) == (name in order)
            order = [other for other in order if other != name]
        kept = [other for other in order if store.peek(other) is not None]
        assert order[len(order) - len(kept) :] == kept  # only the oldest went
        order = kept
        assert len(store) == len(kept) <= most
        assert store.num_bytes <= max_bytes
        assert store.num_bytes == sum(found.num_bytes for found in map(store.peek, kept) if found is not None)


def test_a_response_that_is_too_large_alone_is_not_kept_and_pushes_nobody_out() -> None:
    store = MemoryStore(10, 2000)
    store.put(stored(1))
    store.put(stored(2, 5000))
    assert store.get("resp_2") is None
    assert store.get("resp_1") is not None


def test_a_conversation_is_context_input_and_output() -> None:
    one = stored(1)
    one.context = [{"role": "user", "content": "before"}]
    assert [item["content"] for item in one.conversation()] == ["before", ""]
    assert msgspec.json.encode(one.response)
