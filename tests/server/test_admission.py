"""The bounded queue."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.admission import Admission
from quire.types.errors import QueueFullError, RequestError
from tests.server.helpers import http, long_client, make_app


@given(st.lists(st.integers(1, 6), max_size=20), st.integers(0, 5), st.integers(1, 5))
def test_never_more_open_than_the_limit_and_none_left(counts: list[int], max_queue: int, max_num_seqs: int) -> None:
    admission = Admission(max_queue)
    with ExitStack() as stack:
        for count in counts:
            fits = admission.num_open + count <= max_queue + max_num_seqs
            try:
                stack.enter_context(admission.enter(count, max_num_seqs, "n"))
                assert fits
            except QueueFullError:
                assert not fits
            except RequestError:
                assert count > max_queue + max_num_seqs
    assert admission.num_open == 0


async def test_past_the_queue_a_request_is_refused_and_later_taken() -> None:
    client = long_client(lambda request: (65 for _ in range(10**6)))
    async with http(make_app(client, max_queue=1)) as session:
        limit = client.info.max_num_seqs + 1
        body = {"prompt": "x", "max_tokens": 100_000, "stream": True}
        tasks = [asyncio.create_task(session.post("/v1/completions", json=body)) for _ in range(limit)]
        while len(client.added) < limit:
            await asyncio.sleep(0)
        refused = await session.post("/v1/completions", json={"prompt": "x"})
        never = await session.post("/v1/completions", json={"prompt": ["x"] * (limit + 1)})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        taken = await session.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert (refused.status_code, never.status_code, taken.status_code) == (503, 400, 200)
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert never.json()["error"]["param"] == "prompt"
    assert len(client.aborted) == limit


def test_the_refusal_says_what_is_full() -> None:
    admission = Admission(2)
    with admission.enter(3, 1, "n"), pytest.raises(QueueFullError, match=r"3 completions .* takes 2 beyond the 1"):
        admission.enter(1, 1, "n").__enter__()
