"""Nothing of a request outlives it, although the garbage collector is off; and memory does not grow with requests."""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.client import InProcClient
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import load_text_model
from quire.sched.scheduler import Scheduler
from quire.types.errors import QuireError
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer

# What a request is made of, on its way through the frontend, the scheduler and the worker.
REQUEST_TYPES = {
    "AsyncMailbox",
    "Chunk",
    "CompletionOutput",
    "CompletionState",
    "EngineRequest",
    "GenerationError",
    "InFlight",
    "IncrementalDetokenizer",
    "InputBatch",
    "KVSequence",
    "Mailbox",
    "PreparedRequest",
    "ProcessedOutputs",
    "Request",
    "RequestOutput",
    "RequestState",
    "RowStart",
    "SampleOutput",
    "StepPlan",
    "StepResult",
    "StopStringMatcher",
    "TokenLogprobs",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=64, kv_cache_memory=1 << 20, max_num_seqs=8) as llm:
        yield llm


Living = Callable[[], Counter[str]]


@pytest.fixture
def living() -> Iterator[Living]:
    """Counts the objects of requests by type, those that were there before excepted. The collector is off."""
    gc.collect()
    gc.disable()
    before = request_objects()  # held, so that no new object gets the address of one of them

    def count() -> Counter[str]:
        known = set(map(id, before))
        return Counter(type(item).__name__ for item in request_objects() if id(item) not in known)

    yield count
    gc.enable()


def request_objects() -> list[object]:
    return [
        item
        for item in gc.get_objects()
        if type(item).__name__ in REQUEST_TYPES and type(item).__module__.startswith("quire")
    ]


def scheduler_of(client: object) -> Scheduler:
    assert isinstance(client, InProcClient)
    return client._core.scheduler


def assert_idle(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def mixed_params(index: int) -> SamplingParams:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"seed": index, "top_p": 0.9, "logprobs": 2},
        {"n": 2, "prompt_logprobs": 1, "repetition_penalty": 1.2},
        {"stop": ["a", "e"], "bad_words": ["zz"], "min_tokens": 1, "logit_bias": {40: 1.0}},
    ]
    return SamplingParams(max_tokens=1 + index % 7, **kinds[index % 4])  # type: ignore[arg-type]  # a table


def test_nothing_of_a_request_lives_on(llm: LLM, living: Living) -> None:
    for round_ in range(3):
        prompts = [f"prompt {index} of round {round_}" for index in range(20)]
        llm.generate(prompts, [mixed_params(index) for index in range(20)])
        assert living() == {}
        assert_idle(scheduler_of(llm._client))


def test_nor_of_one_that_was_cut_short_or_failed(llm: LLM, living: Living) -> None:
    stream = llm.stream("tell me a story", SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    assert living()["Request"] == living()["EngineRequest"] == 1, "the measurement itself is broken"
    stream.close()
    del stream
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=2, max_tokens=4)
    for prompt in ("fails inside", "", [100_000]):
        with suppress(QuireError):
            llm.generate(prompt, impossible)
    with suppress(QuireError):
        llm.generate(["good", "", "fails"], [SamplingParams(), SamplingParams(), impossible])
    assert living() == {}
    assert_idle(scheduler_of(llm._client))


async def test_nor_of_one_in_the_async_engine(model: Path, living: Living) -> None:
    from quire.config.engine import EngineConfig
    from quire.engine.client import make_inproc_client

    config = EngineConfig.from_flat(model=str(model), max_model_len=64, kv_cache_memory=1 << 20)
    client = make_inproc_client(config)
    async with AsyncEngine(client, load_text_model(config.model)) as engine:
        for index in range(8):
            async for _ in engine.generate(f"number {index}", mixed_params(index)):
                pass
        stream = engine.generate("cut short", SamplingParams(max_tokens=40, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        async for _ in engine.generate("the last one", SamplingParams(max_tokens=8)):
            pass
        del stream, _
        found = living()
    # The newest step's output may still be a local of the task that waits for the next one.
    assert sum(found.values()) <= 2, found
    assert_idle(scheduler_of(client))


def test_memory_does_not_grow_with_requests(llm: LLM, living: Living) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def run(rounds: int) -> None:
        for round_ in range(rounds):
            llm.generate([f"{round_} {index}" for index in range(10)], [mixed_params(i) for i in range(10)])

    run(10)
    objects, before = len(gc.get_objects()), resident()
    run(30)
    assert len(gc.get_objects()) - objects < 100
    assert resident() - before < 16 << 20


def test_shutdown_frees_the_model_and_may_be_repeated(model: Path, living: Living) -> None:
    def layers() -> int:
        return sum(type(item).__name__ == "DecoderLayer" for item in gc.get_objects())

    before = layers()
    llm = LLM(str(model), max_model_len=64, kv_cache_memory=1 << 20)
    assert layers() == before + 2
    llm.generate("Hello", SamplingParams(max_tokens=2))
    llm.shutdown()
    llm.shutdown()
    assert layers() == before
