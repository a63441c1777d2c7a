"""Grammars together with everything else: the same tokens as one request alone in a plain engine, to the last bit."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.client import InProcClient
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.frontend.text_model import load_text_model
from quire.kernels.cpu import library
from quire.layers.quant.base import GroupedMethod
from quire.planning.engine_plan import plan_memory
from quire.runner.eager import Eager
from quire.runner.kernel_list import KernelList
from quire.sched.draft_lengths import EveryDraft
from quire.sched.drafts import Drafts
from quire.types.errors import BatchError, RequestError
from quire.types.outputs import RequestOutput
from quire.types.step import StartedStep, StepPlan
from quire.worker.executor import Executor
from quire.worker.inproc import InProcStep
from tests.e2e.covering import Row, covering_rows
from tests.e2e.test_lora import make_adapter
from tests.e2e.tiny import EXPERTS, LATENT, RECURRENT, make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.runner.engines import run_eagerly, spy_on, worker_of

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["id", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, StructuredOutputsParams | None] = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex="[a-f0-9]{4,40}(-[0-9]{2})*"),
    "choice": StructuredOutputsParams(choice=["positive", "negative", "neither"]),
    "none": None,
}
SHARED = "One prefix that many of these prompts have in common; "
REQUEST_FACTORS = {
    "grammar": list(GRAMMARS),
    "n": [1, 3],
    "sampling": [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 8, "top_p": 0.9}],
    "penalty": [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}],
    "logprobs": [None, 3],
    "stop": [(), ("7", "ti")],
    "min_tokens": [0, 12],
    "ignore_eos": [False, True],
    "adapter": [None, "first", "second"],
}
ENGINE_FACTORS = {
    "steps_in_flight": [1, 2, 3],
    "memory": ["plenty", "short"],
    "enable_prefix_caching": [False, True],
    "faults": [False, True],
    "way": ["fastest", "eager"],  # where steps can be replayed, as a list of kernel calls or a graph, and not
    "quantized": ["", "w4a16"],  # a scheme of the checkpoint
    # Of mixers and MLPs; latent attention goes with experts, and sparse is latent with an indexer.
    "kind": ["dense", "experts", "latent", "sparse", "recurrent"],
    "speculation": ["none", "ngram", "suffix", "prediction"],
}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}  # two adapters take turns in the slot
MAX_LEN = 160


class FaultyExecutor(Executor):
    """Fails some steps."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StartedStep:
        self._num_steps += 1
        if self._num_steps % 37 == 5:
            return InProcStep(None, error=RuntimeError("a step failed on purpose"))
        return self._inner.execute(plan)

    def is_sticky(self, error: Exception) -> bool:
        return self._inner.is_sticky(error)

    def shutdown(self) -> None:
        self._inner.shutdown()


Models = dict[tuple[str, str], Path]  # by the scheme of its weights, and the kind of its layers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("structured")
    dense = make_model(folder / "dense", "llama")
    experts = make_model(folder / "experts", "qwen3_moe", **EXPERTS)
    latent = make_model(folder / "latent", "deepseek_v3", **LATENT | {"q_lora_rank": 32})  # groups of 32 divide it
    index = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 4}
    sparse = make_model(folder / "sparse", "deepseek_v32", **LATENT | index | {"q_lora_rank": 32})
    recurrent = make_model(folder / "recurrent", "qwen3_5_text", **RECURRENT)
    found = {}
    for path in (dense, experts, latent, sparse, recurrent):
        write_tokenizer(path)
        found["", path.name] = path
        found["w4a16", path.name] = written = folder / f"{path.name}-w4a16"
        assert main(["quantize", str(path), "--scheme", "w4a16", "--out", str(written)]) == 0
        for seed, name in enumerate(("first", "second")):
            layers = "all-linear" if path is dense and not seed else ["q_proj", "o_proj"]
            make_adapter(path, folder / f"{path.name}-{name}", seed, target_modules=layers)
    return found


def adapter_of(models: Models, row: Row) -> LoRARequest | None:
    if row["adapter"] is None:
        return None
    base = models["", row["kind"]]
    return LoRARequest(row["adapter"], 0, str(base.parent / f"{base.name}-{row['adapter']}"))


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models["", "dense"]


def start(model: Path, *, way: str = "fastest", **settings: Any) -> tuple[LLM, EngineCore]:
    config = EngineConfig.from_flat(model=str(model), max_model_len=MAX_LEN, **settings)
    core, info, _ = build_engine(config)
    if way == "eager":
        run_eagerly(core)
    client = InProcClient(core, EngineLoop(core, debug_checks=True), info)
    return LLM.from_client(client, load_text_model(config.model)), core


PLAIN = {"steps_in_flight": 1, "enable_prefix_caching": False, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    llm, _ = start(model, way="eager", **PLAIN)
    with llm:
        yield llm


def params_of(row: Row, seed: int) -> SamplingParams:
    return SamplingParams(
        **row["sampling"],
        **row["penalty"],
        n=row["n"],
        seed=seed,
        logprobs=row["logprobs"],
        stop=row["stop"],
        min_tokens=row["min_tokens"],
        ignore_eos=row["ignore_eos"],
        max_tokens=40,
        structured_outputs=GRAMMARS[row["grammar"]],
    )


def prompt_of(index: int) -> str:
    return SHARED + f"and number {index}"


Content = list[tuple[Any, ...]]  # of each completion


def content(output: RequestOutput) -> Content:
    return [(o.token_ids, o.text, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs]


ROWS = covering_rows(REQUEST_FACTORS | ENGINE_FACTORS)
ENGINES = sorted({tuple(row[name] for name in ENGINE_FACTORS) for row in ROWS})


@pytest.fixture(scope="module")
def alone(models: Models) -> list[Content]:
    """What each row must give: run one after another in a plain engine of its model."""
    found: dict[int, Content] = {}
    for key, model in models.items():
        with start(model, way="eager", **PLAIN, **LORA)[0] as llm:
            for index, row in enumerate(ROWS):
                if (row["quantized"], row["kind"]) == key:
                    adapter, params = adapter_of(models, row), params_of(row, index)
                    outputs = llm.generate(prompt_of(index), params, use_tqdm=False, lora_request=adapter)
                    found[index] = content(outputs[0])
    return [found[index] for index in range(len(ROWS))]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda values: "-".join(map(str, values)))
def test_any_three_features_together(models: Models, alone: list[Content], engine: tuple[Any, ...]) -> None:
    settings = dict(zip(ENGINE_FACTORS, engine, strict=True))
    memory, kind = settings.pop("memory"), settings.pop("kind")
    quantized = settings.pop("quantized")
    model = models[quantized, kind]
    if memory == "short":
        layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
        settings |= {"kv_cache_memory": layout.bytes_for(MAX_LEN, 64) + 2 * layout.page_bytes}
    mine = [index for index, row in enumerate(ROWS) if tuple(row[name] for name in ENGINE_FACTORS) == engine]
    faults, way, method = settings.pop("faults"), settings.pop("way"), settings.pop("speculation")
    settings["speculative_config"] = {"method": method}
    llm, core = start(model, way=way, max_num_seqs=8, max_num_batched_tokens=64, **settings, **LORA)
    check_experts(core, kind, quantized)
    verify_every_draft(core)
    spy = spy_on(core)
    if faults:
        core.executor = FaultyExecutor(core.executor)
    with llm:
        prompts: list[Any] = [prompt_of(index) for index in mine]
        if method == "prediction":
            prompts = [
                {"prompt": prompt, "prediction": nearly(alone[index])}
                for prompt, index in zip(prompts, mine, strict=True)
            ]
        params = [params_of(ROWS[index], index) for index in mine]
        adapters = [adapter_of(models, ROWS[index]) for index in mine]
        if memory == "short":  # these grow until not all fit
            prompts += [prompt_of(index) for index in range(3)]
            params += [SamplingParams(max_tokens=70, ignore_eos=True)] * 3
            adapters += [None] * 3
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        assert [content(output) for output in outputs[: len(mine)]] == [alone[index] for index in mine]
        assert isinstance(spy.way, Eager if way == "eager" or library.load() is None else KernelList)
        assert spy.ran
        # Where states are short, requests wait to begin.
        assert memory == "plenty" or kind == "recurrent" or core.scheduler.stats().num_preemptions > 0
        assert not core.constraints.in_use
        assert not core.has_unfinished()
        assert method != "none" or not core.stats().num_draft_tokens
        assert faults or method != "prediction" or core.stats().num_draft_tokens


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_any_features_together_on_two_ranks(model: Path, method: str) -> None:
    """The requests of all rows give the bits of one rank."""
    found: list[list[Content]] = []
    for size in (1, 2):
        settings = {"tensor_parallel_size": size, "tp_exact": True, "speculative_config": {"method": method}}
        llm, _ = start(model, max_num_seqs=8, max_num_batched_tokens=64, **settings)
        with llm:
            params = [params_of(row, index) for index, row in enumerate(ROWS)]
            outputs = llm.generate([prompt_of(index) for index in range(len(ROWS))], params, use_tqdm=False)
            found.append([content(output) for output in outputs])
    assert found[0] == found[1]


def check_experts(core: EngineCore, kind: str, quantized: str) -> None:
    """A model with experts that is quantized has quantized experts."""
    model = worker_of(core).model
    assert model is not None
    kept = {method.kept for method in model.modules() if isinstance(method, GroupedMethod)}
    assert bool(kept) == (kind in ("experts", "latent", "sparse"))
    assert not kept or ("code4" in kept.pop()) == (quantized == "w4a16") or library.load() is None


def verify_every_draft(core: EngineCore) -> None:
    """How many are worth it depends on times, which differ from run to run."""
    drafting = core.scheduler._state.drafting
    if isinstance(drafting, Drafts):
        drafting._lengths = EveryDraft()


def nearly(completions: Content) -> list[int]:
    """What the first completion says, with a token that is wrong and one that is not there."""
    tokens = list(completions[0][0])
    if len(tokens) > 4:
        tokens[3] ^= 1
        del tokens[len(tokens) // 2]
    return tokens


def test_finished_outputs_obey(plain: LLM) -> None:
    for seed in range(3):
        for name, grammar in GRAMMARS.items():
            params = SamplingParams(temperature=1.5, seed=seed, max_tokens=90, structured_outputs=grammar)
            (one,) = plain.generate("Say it:", params, use_tqdm=False)[0].outputs
            if one.finish_reason == "length" or name == "none":
                continue
            if name == "json":
                jsonschema.validate(json.loads(one.text), SCHEMA)
            elif name == "regex":
                assert re.fullmatch("[a-f0-9]{4,40}(-[0-9]{2})*", one.text)
            else:
                assert one.text in ("positive", "negative", "neither")


def test_how_an_output_ends(plain: LLM) -> None:
    def say(text: str, **more: Any) -> Any:
        grammar = StructuredOutputsParams(regex=text)
        params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=grammar, **more)
        return plain.generate("x", params, use_tqdm=False)[0].outputs[0]

    done = say("abc")
    assert (done.text, len(done.token_ids), done.finish_reason, done.stop_reason) == ("abc", 3, "stop", None)
    # Where nothing may follow, the output ends, whatever else was asked for.
    assert say("abc", min_tokens=10).text == "abc"
    assert say("abc", ignore_eos=True).finish_reason == "stop"
    # A complete output of just max_tokens is not cut off.
    assert say("a{20}").finish_reason == "stop"
    assert say("a{21}").finish_reason == "length"
    # Where something may follow, it does until min_tokens, and for ever under ignore_eos.
    assert len(say("a+", min_tokens=7).token_ids) >= 7
    assert (say("a+", ignore_eos=True).text, say("a+", ignore_eos=True).finish_reason) == ("a" * 20, "length")
    # Stop strings and stop tokens cut as they always do.
    assert (say("abcdef", stop=["cd"]).text, say("abcdef", stop=["cd"]).stop_reason) == ("ab", "cd")
    token = plain.get_tokenizer().encode("d", add_special_tokens=False)[0]
    stopped = say("abcdef", stop_token_ids=[token])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("abc", "stop", token)


def test_what_leaves_no_token_fails_that_request_alone(plain: LLM) -> None:
    tokenizer = plain.get_tokenizer()
    forbidden = tokenizer.encode("x", add_special_tokens=False)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="abc"), allowed_token_ids=forbidden)
    good = SamplingParams(structured_outputs=StructuredOutputsParams(regex="abc"))
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: nothing"))
    with pytest.raises(BatchError) as info:
        plain.generate(["a", "b", "c"], [bad, good, wrong], use_tqdm=False)
    assert info.value.outputs[1].outputs[0].text == "abc"
    assert "no token may be chosen" in str(info.value.errors[0])
    assert isinstance(info.value.errors[0], RequestError)
    assert info.value.errors[0].field == "allowed_token_ids"
    assert isinstance(info.value.errors[2], RequestError)
    assert info.value.errors[2].field == "structured_outputs.grammar"


def test_logprobs_are_those_of_the_model(plain: LLM) -> None:
    """The mask changes what is chosen, not what is reported."""
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=1)
    free = plain.generate("x", params, use_tqdm=False)[0].outputs[0].logprobs
    grammar = StructuredOutputsParams(regex="[a-z]")
    held = SamplingParams(temperature=0.0, logprobs=2, max_tokens=1, structured_outputs=grammar)
    constrained = plain.generate("x", held, use_tqdm=False)[0].outputs[0].logprobs
    assert free is not None
    assert constrained is not None
    for token, logprob in free[0].items():
        assert constrained[0][token].logprob == logprob.logprob


def test_an_abort_forgets_the_grammar(model: Path) -> None:
    llm, core = start(model)
    with llm:
        stream = llm.stream(
            "x", SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(regex="a+"))
        )
        next(stream)
        assert core.constraints.in_use
        stream.close()
        assert not core.constraints.in_use


def deep_schema() -> dict[str, Any]:
    node: dict[str, Any] = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
    for name in ("left", "right", "next"):
        node["properties"][name] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "array", "items": {"$ref": "#"}}]}
    schema: dict[str, Any] = {"$ref": "#/$defs/node"}
    for _ in range(12):
        schema = {"type": "object", "properties": {"deeper": schema}, "required": ["deeper"]}
    return {**schema, "$defs": {"node": node}}


PATHOLOGICAL: dict[str, Any] = {
    "deep recursion": deep_schema(),
    "5,000-way enum": {"enum": [f"value number {index} of the enum" for index in range(5000)]},
    "1 MB": {
        "type": "object",
        "properties": {f"p{index}": {"enum": [f"{index} {'x' * 80} {n}" for n in range(10)]} for index in range(950)},
    },
}


def varied(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """The same, as a schema that is not compiled yet."""
    return {**schema, "$defs": {**schema.get("$defs", {}), f"unused_{number}": {}}}


def longest_gap(llm: LLM, core: EngineCore, schema: dict[str, Any]) -> float:
    """The longest time between two tokens of a stream, while a request with this schema arrives and runs."""
    client = llm._client
    stream = llm.stream("y", SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(3):
        next(stream)
    source = StructuredOutputsParams(json=schema)
    prepared = llm._prepare("z", SamplingParams(max_tokens=20, structured_outputs=source), "final_only")
    llm._submit(prepared)
    gaps: list[float] = []
    before = time.perf_counter()
    for _ in stream:
        now = time.perf_counter()
        gaps.append(now - before)
        before = now
    while client.has_unfinished():
        llm._pump()
    llm._mailboxes.pop(prepared.request_id)
    return max(gaps)


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_schema_delays_no_other_stream(model: Path, name: str) -> None:
    if name == "1 MB":
        assert 800_000 < len(json.dumps(PATHOLOGICAL[name])) < 1 << 20
    before = set(threading.enumerate())
    llm, core = start(model, steps_in_flight=2)
    with llm:
        trivial = {"type": "object", "properties": {"a": {"type": "null"}}}
        longest_gap(llm, core, trivial)  # builds the backend
        # On a busy machine a gap can come from elsewhere; from the schema it would come every time.
        extra = [
            longest_gap(llm, core, varied(PATHOLOGICAL[name], n)) - longest_gap(llm, core, trivial) for n in range(2)
        ]
        assert min(extra) < 0.05, extra
    limit = time.monotonic() + 30  # a compilation cannot be interrupted: its thread ends when it does
    while (left := set(threading.enumerate()) - before) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not left
