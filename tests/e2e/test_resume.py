"""A request that is cut and submitted again with its outputs goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire.engine.core import EngineCore
from quire.types.sampling import RepetitionDetectionParams, SamplingParams
from tests.corpus.requests import corpus_jobs
from tests.e2e.tiny import Answer, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY, regex
from tests.gpu.helpers import Job

# Repeats what it says within a few tokens: the detector has to know those from before the cut.
LOOPING = Job(
    "looping",
    [7, 8],
    SamplingParams(
        temperature=0.0,
        max_tokens=40,
        min_tokens=9,
        ignore_eos=True,
        allowed_token_ids=[30],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4),
    ),
)
ENDLESS = Job(
    "endless",
    [9, 5],
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, frequency_penalty=0.7, logprobs=2),
    regex("[a-p]+"),
)


def jobs() -> list[Job]:
    return [*corpus_jobs(), LOOPING, ENDLESS]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    model = make_model(tmp_path_factory.mktemp("resume") / "model", "qwen3", max_position_embeddings=1024)
    core = make_engine(model, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=96, steps_in_flight=2)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    core.shutdown()


def run(core: EngineCore, requests: list[Job], **fields: dict[str, Any]) -> dict[str, Answer]:
    """`fields` are those of single requests, by name."""
    driver = Driver(core)
    for job in requests:
        driver.add(job.name, job.token_ids, job.params, grammar=job.grammar, **fields.get(job.name, {}))
    while core.has_unfinished():
        driver.step()
    return driver.answers


@pytest.fixture(scope="module")
def whole(core: EngineCore) -> dict[str, Answer]:
    return run(core, jobs())


def test_the_corpus_has_every_way_to_end(whole: dict[str, Answer]) -> None:
    assert {answer.finish_reason for answer in whole.values()} >= {"length", "stop", "repetition"}
    assert all(answer.error is None for answer in whole.values())
    assert sum(len(answer.token_ids) > 1 for answer in whole.values()) > 30


@pytest.mark.parametrize("cut", ["first", "middle", "last"])
def test_going_on_after_a_cut_gives_the_same(core: EngineCore, whole: dict[str, Answer], cut: str) -> None:
    again: list[Job] = []
    fields: dict[str, dict[str, Any]] = {}
    cuts: dict[str, int] = {}
    for job in jobs():
        count = len(whole[job.name].token_ids)
        if count < 2:
            continue
        cuts[job.name] = place = {"first": 1, "middle": count // 2, "last": count - 1}[cut]
        again.append(replace(job, token_ids=job.token_ids + whole[job.name].token_ids[:place]))
        fields[job.name] = {"num_prompt_tokens": len(job.token_ids)}
    random.Random(cut).shuffle(again)
    core.scheduler.reset_prefix_cache()
    rest = run(core, again, **fields)
    for name, place in cuts.items():
        before, after = whole[name], rest[name]
        assert after.error is None, name
        assert after.token_ids == before.token_ids[place:], name
        assert after.logprobs == before.logprobs[place:], name
        assert after.finish_reason == before.finish_reason, name
        assert after.prompt_logprobs == [], "they came before the first output"


def test_what_the_grammar_does_not_allow_is_refused(core: EngineCore) -> None:
    job = replace(ENDLESS, token_ids=[9, 5, 40, 3])
    answer = run(core, [job], endless={"num_prompt_tokens": 2})["endless"]
    assert answer.finish_reason == "error"
    assert "grammar" in (answer.error or "")


def test_an_output_that_its_grammar_has_ended_is_refused(core: EngineCore) -> None:
    done = Job("done", [9, 5, 68], msgspec.structs.replace(ENDLESS.params, max_tokens=4), regex("a"))
    answer = run(core, [done], done={"num_prompt_tokens": 2})["done"]
    assert VOCABULARY.pieces[68] == b"a"
    assert "has ended" in (answer.error or "")
