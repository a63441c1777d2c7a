"""Every drafter beside every combination of three things that requests ask for: the answers of no speculation.

What requests ask for is a covering array of its own, all of whose rows are sent to each engine. Engines differ in who
drafts, in what the target keeps, in steps in flight, and in a cache that is too small for all requests at once.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.planning.engine_plan import plan_memory
from quire.structured.sources import make_source
from quire.types.sampling import SamplingParams
from quire.types.step import StepResult
from quire.types.structured import StructuredOutputsParams
from tests.e2e import draft_heads
from tests.e2e.covering import Row, covering_rows
from tests.e2e.draft_heads import Target
from tests.e2e.drafting import Counting, assert_same, draft_always, engine
from tests.e2e.test_draft_model import GEMMA
from tests.e2e.tiny import LATENT, RECURRENT, VOCAB, Answer, Driver, make_model
from tests.e2e.tiny_grammar import regex, text_of
from tests.runner.engines import runner_of

TAGS = [{"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"}]
# A random model writes no trigger by itself, so that a call has to come first.
CALLS = [{"type": "tag", **TAGS[0]}, {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}]
TOOLS = {"type": "structural_tag", "format": {"type": "sequence", "elements": CALLS}}
GRAMMARS = {
    "regex": regex(r"([a-f]{1,3}[0-9]){2,12}"),
    "tools": make_source(StructuredOutputsParams(structural_tag=json.dumps(TOOLS))),
}
ASKED: dict[str, list[Any]] = {
    "temperature": [0.0, 0.9],
    "grammar": [None, "regex", "tools"],
    "logprobs": [None, 2],
    "penalties": [False, True],
    "min_tokens": [0, 8],
    "bad_words": [False, True],
    "n": [1, 2],
    "shares_prefix": [False, True],
}
ENGINES: dict[str, list[Any]] = {
    "drafter": ["ngram", "suffix", "prediction", "draft_model", "eagle", "eagle3", "medusa", "mtp"],
    "target": ["full", "windows", "latents", "states"],
    "steps_in_flight": [1, 2, 3],
    "is_small": [False, True],
}
MTP = {
    "full": draft_heads.mtp_glm,
    "windows": draft_heads.mtp_windows,
    "latents": draft_heads.mtp_deepseek,
    "states": draft_heads.mtp_qwen,
}
PAIRS, TRIPLES = covering_rows(ENGINES, strength=2), covering_rows(ENGINES, strength=3)
STEM = [random.Random(5).randrange(3, VOCAB) for _ in range(34)]


def send(driver: Driver, known: dict[str, Answer] | None = None) -> None:
    """All requests; with what they will say for an answer as their predictions, a few tokens of it wrong."""
    rng = random.Random(1)
    for number, row in enumerate(covering_rows(ASKED)):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
        prompt = STEM + own if row["shares_prefix"] else own * 3  # what is repeated is found by its n-grams
        for copy in range(row["n"]):
            name = f"{number}-{copy}"
            fields: dict[str, Any] = {} if row["grammar"] is None else {"grammar": GRAMMARS[row["grammar"]]}
            if known is not None:
                tokens = known[name].token_ids
                fields["prediction"] = [(t + 1) % VOCAB if at % 7 == 5 else t for at, t in enumerate(tokens)]
            driver.add(name, prompt, params_of(row, 100 * number + copy), **fields)
        if number % 3 == 0:
            driver.step()


def params_of(row: Row, seed: int) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": row["temperature"], "logprobs": row["logprobs"]}
    if row["penalties"]:
        fields |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if row["bad_words"]:
        fields["bad_words_token_ids"] = tuple((token, other) for token in range(9, 70) for other in (7, 8, 9))
    if row["grammar"] is None:
        fields |= {"min_tokens": row["min_tokens"], "stop_token_ids": tuple(range(30, 40))}
    return SamplingParams(seed=seed, max_tokens=14, **fields)


@pytest.fixture(scope="module")
def drafters(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[tuple[str, str], tuple[Path, dict[str, Any]]]]:
    """By drafter and kind of target: the target, and the settings."""
    folder = tmp_path_factory.mktemp("covering")
    targets = {
        "full": make_model(folder / "llama", "llama"),
        "windows": make_model(folder / "gemma3", "gemma3_text", **GEMMA),
        "latents": make_model(folder / "deepseek", "deepseek_v3", **LATENT, head_dim=8),
        "states": make_model(folder / "qwen3_next", "qwen3_next", **RECURRENT),
    }
    small = make_model(folder / "small", "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    found: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}
    for kind, target in targets.items():
        heads = {"eagle": draft_heads.eagle, "eagle3": draft_heads.eagle3, "medusa": draft_heads.medusa}
        for name, make in heads.items():
            head, _ = make(folder / f"{name}-{kind}", Target(target))
            found[name, kind] = target, {"method": name, "model": str(head)}
        found["draft_model", kind] = target, {"method": "draft_model", "model": str(small)}
        for name in ("ngram", "suffix", "prediction"):
            found[name, kind] = target, {"method": name}
    for kind, make_mtp in MTP.items():
        found["mtp", kind] = make_mtp(folder / f"mtp-{kind}")[0], {"method": "mtp"}
    with draft_heads.windowed_mtp():
        yield found


@pytest.fixture(scope="module")
def expected(
    drafters: dict[tuple[str, str], tuple[Path, dict[str, Any]]],
) -> dict[Path, dict[str, Answer]]:
    found = {}
    for target in dict.fromkeys(target for target, _ in drafters.values()):
        driver = Driver(engine(target, max_model_len=140))
        send(driver)
        found[target] = driver.finish()
        called = [name for name, answer in found[target].items() if text_of(answer.token_ids).startswith("<f=x>")]
        rows = covering_rows(ASKED)
        assert called == [name for name in found[target] if rows[int(name.split("-")[0])]["grammar"] == "tools"]
    return found


def make_core(target: Path, config: dict[str, Any], row: Row) -> EngineCore:
    config = {**config, "num_speculative_tokens": 3}
    settings: dict[str, Any] = {"max_model_len": 140, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    if row["is_small"]:
        layout = plan_memory(EngineConfig.from_flat(model=str(target), speculative_config=config)).layout
        settings["kv_cache_memory"] = layout.bytes_for(140, 64) + layout.page_bytes
    return engine(target, speculative_config=config, steps_in_flight=row["steps_in_flight"], **settings)


def know_every_third(core: EngineCore, known: dict[str, Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one proposal of three be what will be said: random weights are hardly ever right."""
    runner, count = runner_of(core), itertools.count()
    finish = runner.finish

    def finish_knowing(step: Any) -> StepResult:
        result = finish(step)
        requests = {request.row: request for request in core.scheduler._state.running}
        for index, tokens in result.proposals.items():
            request = requests.get(step.plan.rows[index])
            if request is None or next(count) % 3:
                continue
            first = len(request.token_ids) - request.num_prompt_tokens + len(result.token_ids[index])
            said = known[request.request_id].token_ids[first : first + len(tokens)]
            tokens[: len(said)] = said
        return result

    monkeypatch.setattr(runner, "finish", finish_knowing)


@pytest.mark.parametrize(
    "rows", [pytest.param(PAIRS, id="pairs"), pytest.param(TRIPLES, id="triples", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("drafter", ENGINES["drafter"])
def test_answers_are_those_of_no_speculation(
    drafters: dict[tuple[str, str], tuple[Path, dict[str, Any]]],
    expected: dict[Path, dict[str, Answer]],
    drafter: str,
    rows: list[Row],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_drafts = num_accepted = num_preemptions = 0
    for row in (row for row in rows if row["drafter"] == drafter):
        target, config = drafters[drafter, row["target"]]
        core = make_core(target, config, row)
        draft_always(core)
        know_every_third(core, expected[target], monkeypatch)
        counted, driver = Counting(core), Driver(core)
        send(driver, expected[target] if drafter == "prediction" else None)
        assert_same(driver.finish(), expected[target])
        core.scheduler.check_integrity()
        stats = core.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks, f"blocks of drafts are given back: {row}"
        num_drafts, num_accepted = num_drafts + counted.num_drafts, num_accepted + counted.num_accepted
        num_preemptions += stats.num_preemptions
    assert num_drafts > 20
    # States are as many as there are rows, so that rows wait for them and are not preempted.
    small = [row for row in rows if row["drafter"] == drafter and row["is_small"] and row["target"] != "states"]
    assert num_preemptions > 0 or not small
    assert num_accepted > num_drafts / 4, "heads alone reach a fifth at most, mostly tokens that a grammar forces"
