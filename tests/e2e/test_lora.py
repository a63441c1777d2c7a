"""LoRA adapters: any mix of them in a batch gives what each gives alone, and what merged weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from quire.loader.adapter_files import digest_of
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import EXPERTS, LATENT, RECURRENT, Answer, make_engine, make_model, run_all
from tests.loader.gguf_tiny import write_tiny_gguf

PROMPTS = [[5, 9, 33, 7, 21, 4, 60] * 5, [8, 3], [17, 90, 4, 4, 4, 12], [120, 7, 66, 3, 9, 10, 11, 12, 13, 14]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "enable_lora": True, "max_loras": 2}


def make_adapter(model: Path, folder: Path, seed: int, **config: Any) -> AdapterRef:
    """An adapter that PEFT saves, and the merged model beside it."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model)
    settings = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False, **config}
    adapted = get_peft_model(base, LoraConfig(**settings))
    adapted.save_pretrained(folder, save_embedding_layers=False)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return AdapterRef(folder.name, digest_of(folder), str(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("lora") / "base", "llama")


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[AdapterRef]:
    return [
        make_adapter(model, model.parent / "first", 1),
        make_adapter(model, model.parent / "second", 2, r=8, use_rslora=True, target_modules=["q_proj", "down_proj"]),
        make_adapter(
            model, model.parent / "third", 3, rank_pattern={"up_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 40}
        ),
    ]


def ask(name: str, prompt: list[int], adapter: AdapterRef | None, **params: Any) -> EngineRequest:
    wanted = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **params)
    return EngineRequest(request_id=name, token_ids=prompt, params=wanted, max_tokens=12, adapter=adapter, seed=7)


def answers(model: Path, requests: list[EngineRequest], **settings: Any) -> dict[str, Answer]:
    core = make_engine(model, **{**SETTINGS, **settings})
    try:
        return run_all(core, requests)
    finally:
        core.executor.shutdown()


def mixed(adapters: list[AdapterRef]) -> list[EngineRequest]:
    choices = [None, *adapters]
    return [
        ask(f"{index}-{number}", prompt, adapter, temperature=0.8 * (index % 2))
        for number, prompt in enumerate(PROMPTS)
        for index, adapter in enumerate(choices)
    ]


def test_a_mixed_batch_is_each_alone_bitwise(model: Path, adapters: list[AdapterRef]) -> None:
    """Three adapters and two slots: some wait for one. Rows without an adapter have the bits of an engine without."""
    requests = mixed(adapters)
    together = answers(model, requests)
    core = make_engine(model, **SETTINGS)
    alone = {request.request_id: run_all(core, [request])[request.request_id] for request in requests}
    core.executor.shutdown()
    assert all(answer.error is None for answer in together.values())
    assert together == alone
    plain = answers(model, [request for request in requests if request.adapter is None], enable_lora=False)
    assert plain == {name: together[name] for name in plain}


@pytest.mark.parametrize("index", range(3))
def test_it_is_the_merged_model(model: Path, adapters: list[AdapterRef], index: int) -> None:
    ref = adapters[index]
    with_adapter = answers(model, [ask(str(number), prompt, ref) for number, prompt in enumerate(PROMPTS)])
    merged = answers(
        Path(ref.path) / "merged",
        [ask(str(number), prompt, None) for number, prompt in enumerate(PROMPTS)],
        enable_lora=False,
    )
    for name, answer in merged.items():
        assert with_adapter[name].token_ids == answer.token_ids
        for mine, theirs in zip(with_adapter[name].logprobs, answer.logprobs, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize(
    ("kind", "sizes", "layers"),
    [
        ("deepseek_v3", LATENT, ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),
        ("qwen3_5_text", RECURRENT, ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj"]),
        ("qwen3_moe", EXPERTS, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
    ids=["latent", "recurrent", "experts"],
)
def test_other_mixers_are_the_merged_model_too(
    tmp_path: Path, kind: str, sizes: dict[str, Any], layers: list[str]
) -> None:
    ref = make_adapter(make_model(tmp_path / "base", kind, **sizes), tmp_path / "it", 1, target_modules=layers)
    adapted = answers(tmp_path / "base", [ask("it", PROMPTS[0], ref)])["it"]
    merged = answers(Path(ref.path) / "merged", [ask("it", PROMPTS[0], None)], enable_lora=False)["it"]
    assert adapted.token_ids == merged.token_ids
    for mine, theirs in zip(adapted.logprobs, merged.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "sizes", "layers", "words"),
    [
        ("qwen3_moe", EXPERTS, ["down_proj"], "holds experts, on which adapters are not"),
        ("deepseek_v3", LATENT, ["kv_b_proj"], "kv_b_proj is no linear layer"),
        ("llama", {"tie_word_embeddings": False}, ["lm_head", "q_proj"], "lm_head is no layer that adapters are"),
        ("llama", {}, ["embed_tokens", "q_proj"], "without the embeddings among its target_modules"),
    ],
)
def test_layers_without_adapters_are_refused_by_name(
    tmp_path: Path, kind: str, sizes: dict[str, Any], layers: list[str], words: str
) -> None:
    base = make_model(tmp_path / "base", kind, **sizes)
    ref = make_adapter(base, tmp_path / "it", 1, target_modules=layers)
    assert words in str(answers(base, [ask("it", PROMPTS[1], ref)])["it"].error)


@pytest.mark.parametrize("base", ["Q4_K", "Q8_0", "int8", "int4"])
def test_packed_and_quantized_bases(tmp_path: Path, base: str) -> None:
    """An adapter in float32 over packed weights: together is alone, and the adapter changes what is said."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "auto"}
    path = tmp_path / "base"
    if base.startswith("Q"):
        path = tmp_path / "tiny.gguf"
        write_tiny_gguf("llama-wide", path, base).save_pretrained(tmp_path / "base")
    else:
        make_model(path, "llama")
        settings["quantization"] = base
    ref = make_adapter(tmp_path / "base", tmp_path / "it", 1)
    requests = [ask(f"{i}-{j}", p, a) for i, p in enumerate(PROMPTS) for j, a in enumerate([None, ref])]
    together = answers(path, requests, **settings)
    core = make_engine(path, **{**SETTINGS, **settings})
    alone = {request.request_id: run_all(core, [request])[request.request_id] for request in requests}
    core.executor.shutdown()
    assert together == alone
    assert all(answer.error is None for answer in together.values())
    assert together["0-0"].token_ids != together["0-1"].token_ids
