from __future__ import annotations

from quire.frontend.logprobs import LogprobsDecoder
from quire.types.outputs import Logprob
from quire.types.step import TokenLogprobs


def test_the_chosen_token_comes_first_and_is_not_repeated() -> None:
    decoder = LogprobsDecoder(lambda token: f"<{token}>")
    decoded = decoder.decode(TokenLogprobs([7, 5, 7, 9], [-2.0, -1.0, -2.0, -3.0], rank=2))
    assert list(decoded.items()) == [
        (7, Logprob(-2.0, 2, "<7>")),
        (5, Logprob(-1.0, 1, "<5>")),
        (9, Logprob(-3.0, 3, "<9>")),
    ]


def test_an_unlikely_choice_keeps_its_rank() -> None:
    decoded = LogprobsDecoder(None).decode(TokenLogprobs([7, 5], [-9.0, -1.0], rank=40))
    assert decoded == {7: Logprob(-9.0, 40, None), 5: Logprob(-1.0, 1, None)}


def test_a_token_is_named_once() -> None:
    asked: list[int] = []
    decoder = LogprobsDecoder(lambda token: asked.append(token) or "")  # type: ignore[func-returns-value]
    for _ in range(3):
        decoder.decode(TokenLogprobs([7, 5], [-1.0, -2.0], rank=1))
    assert asked == [7, 5]


def test_tokens_asked_for_by_id_come_last_with_their_own_ranks() -> None:
    position = TokenLogprobs([7, 5, 7, 90, 5], [-2.0, -1.0, -2.0, -8.0, -1.0], rank=2, asked_ranks=[70, 1])
    assert list(LogprobsDecoder(None).decode(position).items()) == [
        (7, Logprob(-2.0, 2, None)),
        (5, Logprob(-1.0, 1, None)),
        (90, Logprob(-8.0, 70, None)),
    ]
