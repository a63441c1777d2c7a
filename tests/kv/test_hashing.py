from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.kv.hashing import HashChain, root_hash
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


def chain_of(token_ids: list[int], block_size: int = 4, **extra: Any) -> list[bytes]:
    request = EngineRequest(request_id="r", token_ids=token_ids, params=SamplingParams(), **extra)
    chain = HashChain(request, block_size)
    chain.extend(token_ids, len(token_ids))
    return chain.hashes


tokens = st.lists(st.integers(0, 2), max_size=14)


@given(tokens, tokens)
def test_hashes_agree_exactly_as_far_as_full_blocks_do(left: list[int], right: list[int]) -> None:
    for index, (a, b) in enumerate(zip(chain_of(left), chain_of(right), strict=False)):
        assert (a == b) == (left[: 4 * index + 4] == right[: 4 * index + 4])


@given(tokens, st.data())
def test_growing_step_by_step_gives_the_same_chain(token_ids: list[int], data: st.DataObject) -> None:
    request = EngineRequest(request_id="r", token_ids=token_ids, params=SamplingParams())
    chain = HashChain(request, 4)
    known = 0
    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        chain.extend(token_ids[:known], known)
    assert chain.hashes == chain_of(token_ids)
    assert len(chain.hashes) == len(token_ids) // 4


def test_only_the_given_number_of_tokens_is_hashed() -> None:
    request = EngineRequest(request_id="r", token_ids=[1], params=SamplingParams())
    chain = HashChain(request, 4)
    chain.extend(list(range(12)), 7)
    assert len(chain.hashes) == 1


def test_a_salt_separates_whole_chains() -> None:
    token_ids = list(range(8))
    extras: list[dict[str, Any]] = [{}, {"cache_salt": ""}, {"cache_salt": "a"}]
    chains = [chain_of(token_ids, **extra) for extra in extras]
    assert len({chain[0] for chain in chains}) == len(extras)
    assert len({chain[1] for chain in chains}) == len(extras)


def test_root_hash_cannot_be_confused_by_salt_text() -> None:
    def root(salt: str | None) -> bytes:
        return root_hash(EngineRequest(request_id="r", token_ids=[], params=SamplingParams(), cache_salt=salt))

    assert len({root("salt"), root(""), root(None), root("saltsalt"), root("ab")}) == 5
