"""The journal: what is submitted after a death, who is suspected of it, and who is refused."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.journal import Journal
from quire.types.outputs import EngineOutput
from quire.types.step import TokenLogprobs
from tests.engine.processes import request


def names(journal: Journal) -> list[str]:
    return [entry.request.request_id for entry in journal.to_submit()]


def live(journal: Journal) -> list[str]:
    """Submit what is to be submitted; what the engine got."""
    got = journal.to_submit()
    for entry in got:
        journal.note_submitted(entry)
    return [entry.request.request_id for entry in got]


def test_a_request_goes_on_after_the_tokens_that_it_had() -> None:
    journal = Journal()
    entry = journal.open(request("a", [1, 2]))
    live(journal)
    journal.take([EngineOutput("a", [7]), EngineOutput("a", [8, 9]), EngineOutput("unknown", [1])])
    assert journal.has_progressed
    assert journal.end_life() == []
    assert names(journal) == ["a"]
    assert entry.resumed().token_ids == [1, 2, 7, 8, 9]
    assert entry.resumed().num_prompt_tokens == 2
    live(journal)
    journal.take([EngineOutput("a", [10], finish_reason="length")])
    assert len(journal) == 0


def test_a_request_without_tokens_is_submitted_as_it_was() -> None:
    journal = Journal()
    first = request("a", [1, 2])
    entry = journal.open(first)
    live(journal)
    journal.end_life()
    assert entry.resumed() is first


def test_prompt_logprobs_are_delivered_once() -> None:
    said = [TokenLogprobs([token], [-1.0], 1) for token in range(5)]
    journal = Journal()
    journal.open(request("a", [1, 2, 3, 4, 5, 6]))
    live(journal)
    heard = list(journal.take([EngineOutput("a", [], prompt_logprobs=said[:3])]))
    journal.end_life()
    live(journal)
    for part in (said[:2], said[2:4], said[4:]):
        heard += journal.take([EngineOutput("a", [], prompt_logprobs=part)])
    assert [p for output in heard for p in output.prompt_logprobs or ()] == said


def test_one_death_makes_nobody_wait() -> None:
    journal = Journal()
    for name in "abcd":
        journal.open(request(name))
    live(journal)
    journal.end_life()
    assert live(journal) == list("abcd")
    assert not journal.is_trying


def test_after_two_deaths_half_of_the_suspects_run_until_each_has_a_token() -> None:
    journal = Journal()
    for name in "abcd":
        journal.open(request(name))
    for _ in range(2):
        live(journal)
        journal.end_life()
    assert live(journal) == ["a", "b"]
    journal.open(request("e"))
    assert names(journal) == []
    journal.take([EngineOutput("a", [1])])
    assert names(journal) == []
    journal.close("b")  # its client left
    assert live(journal) == ["c", "d"]
    journal.take([EngineOutput("a", [1])])
    journal.end_life()
    assert live(journal) == ["c"]
    journal.take([EngineOutput("c", [1])])
    assert live(journal) == ["d"]
    journal.take([EngineOutput("d", [1])])
    assert live(journal) == ["a", "e"]
    assert not journal.is_trying


def test_who_got_a_token_is_no_suspect() -> None:
    journal = Journal()
    for name in "ab":
        journal.open(request(name))
    for _ in range(5):
        live(journal)
        journal.take([EngineOutput("a", [1]), EngineOutput("b", [1])])
        assert journal.end_life() == []
    assert live(journal) == ["a", "b"]


def test_a_start_that_fails_is_nobodys_fault_and_keeps_the_trial() -> None:
    journal = Journal()
    for name in "abcd":
        journal.open(request(name))
    for _ in range(2):
        live(journal)
        journal.end_life()
    assert names(journal) == ["a", "b"]
    for _ in range(3):
        assert journal.end_life() == []
    assert names(journal) == ["a", "b"]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=3), st.randoms(use_true_random=False))
def test_exactly_the_requests_that_kill_are_refused_and_soon(
    count: int, poison: set[int], chance: random.Random
) -> None:
    poison = {index for index in poison if index < count}
    journal = Journal()
    for index in range(count):
        journal.open(request(str(index), [1]))
    refused: list[str] = []
    deaths = 0
    running: set[str] = set()
    while len(journal):
        running.update(live(journal))
        assert running, "somebody always runs"
        if any(int(name) in poison for name in running):
            deaths += 1
            refused += [entry.request.request_id for entry in journal.end_life()]
            running.clear()
            continue
        done = chance.random() < 0.3
        end = "length" if done else None
        journal.take([EngineOutput(name, [1], finish_reason=end) for name in running])  # type: ignore[arg-type]
        if done:
            running.clear()
    assert sorted(map(int, refused)) == sorted(poison)
    assert deaths <= len(poison) * (4 + 2 * count.bit_length())
