"""LoRA adapters: any mix of them in a batch gives what each gives alone, and what merged weights give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE, digest_of
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import EXPERTS, LATENT, RECURRENT, Answer, make_engine, make_model, run_all
from tests.loader.gguf_tiny import write_tiny_gguf

PROMPTS = [[5, 9, 33, 7, 21, 4, 60] * 5, [8, 3], [17, 90, 4, 4, 4, 12], [120, 7, 66, 3, 9, 10, 11, 12, 13, 14]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "lora_dtype": "float32"}
SETTINGS |= {"enable_lora": True, "max_loras": 2}


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


@pytest.mark.parametrize(
    ("index", "kept", "tolerance"),
    [(0, "float32", 1e-4), (1, "float32", 1e-4), (2, "float32", 1e-4), (0, "auto", 2e-2)],
)
def test_it_is_the_merged_model(
    model: Path, adapters: list[AdapterRef], index: int, kept: str, tolerance: float
) -> None:
    ref = adapters[index]
    asked = [ask(str(number), prompt, ref) for number, prompt in enumerate(PROMPTS)]
    with_adapter = answers(model, asked, lora_dtype=kept)
    merged = answers(
        Path(ref.path) / "merged",
        [ask(str(number), prompt, None) for number, prompt in enumerate(PROMPTS)],
        enable_lora=False,
    )
    for name, answer in merged.items():
        assert with_adapter[name].token_ids == answer.token_ids
        for mine, theirs in zip(with_adapter[name].logprobs, answer.logprobs, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=tolerance, rtol=tolerance
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
        ("qwen3_moe", EXPERTS, ["down_proj"], "start the engine with --lora-experts"),
        ("qwen3_moe", EXPERTS, ["gate"], "mlp.gate is no layer that adapters are served on"),
        ("deepseek_v3", LATENT, ["kv_b_proj"], "kv_b_proj is no linear layer"),
    ],
)
def test_layers_without_adapters_are_refused_by_name(
    tmp_path: Path, kind: str, sizes: dict[str, Any], layers: list[str], words: str
) -> None:
    base = make_model(tmp_path / "base", kind, **sizes)
    ref = make_adapter(base, tmp_path / "it", 1, target_modules=layers)
    assert words in str(answers(base, [ask("it", PROMPTS[1], ref)])["it"].error)


# PEFT makes parameters of the last two, and doubles the rank of the first of them, which is two matrices in one.
ON_EXPERTS: dict[str, Any] = {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]}


def check_mixed(model: Path, ref: AdapterRef, **settings: Any) -> dict[str, Answer]:
    """Answers with and without the adapter, which have the same bits alone and together."""
    requests = [ask(f"{i}-{j}", p, a) for i, p in enumerate(PROMPTS) for j, a in enumerate([None, ref])]
    core = make_engine(model, **{**SETTINGS, **settings})
    together = run_all(core, requests)
    alone = {request.request_id: run_all(core, [request])[request.request_id] for request in requests}
    core.executor.shutdown()
    assert all(answer.error is None for answer in together.values()), together["0-1"].error
    assert all(together[name].content() == alone[name].content() for name in together)
    plain = answers(model, [request for request in requests if request.adapter is None], enable_lora=False)
    assert all(answer.content() == together[name].content() for name, answer in plain.items())
    return together


@pytest.mark.parametrize(
    ("kind", "sizes", "config", "settings"),
    [
        ("llama", {"tie_word_embeddings": False}, {"target_modules": ["lm_head", "q_proj"]}, {}),
        ("llama", {"tie_word_embeddings": False}, {"target_modules": ["embed_tokens"]}, {}),
        ("qwen3_moe", EXPERTS, ON_EXPERTS, {"lora_experts": True}),
    ],
    ids=["head", "embeddings", "experts"],
)
def test_heads_embeddings_and_experts(
    tmp_path: Path, kind: str, sizes: dict[str, Any], config: dict[str, Any], settings: dict[str, Any]
) -> None:
    base = make_model(tmp_path / "base", kind, **sizes)
    ref = make_adapter(base, tmp_path / "it", 1, **config)
    together = check_mixed(base, ref, **settings)
    merged = answers(
        Path(ref.path) / "merged",
        [ask(f"{number}-1", prompt, None) for number, prompt in enumerate(PROMPTS)],
        enable_lora=False,
    )
    for name, answer in merged.items():
        assert together[name].token_ids == answer.token_ids
        assert together[name].token_ids != together[f"{name[0]}-0"].token_ids
        for mine, theirs in zip(together[name].logprobs, answer.logprobs, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-3, rtol=1e-3
            )


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Model with `tie_word_embeddings")
def test_a_tied_head_is_adapted_alone(tmp_path: Path) -> None:
    """The embeddings, which are the same table, stay as they are: as PEFT has it while it is not merged."""
    base = make_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    ref = make_adapter(base, tmp_path / "it", 1, target_modules=["lm_head"])
    together = check_mixed(base, ref)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ref.path)
    for number, prompt in enumerate(PROMPTS):
        expected = adapted(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        first = together[f"{number}-1"].logprobs[0]
        torch.testing.assert_close(
            torch.tensor(first.logprobs), expected[torch.tensor(first.token_ids)], atol=1e-3, rtol=1e-3
        )


def test_experts_by_themselves_are_all_experts_at_once(tmp_path: Path) -> None:
    """PEFT's layout of models whose experts are modules: the same matrices, so the same bits."""
    base = make_model(tmp_path / "base", "qwen3_moe", **EXPERTS)
    fused = make_adapter(base, tmp_path / "fused", 1, **ON_EXPERTS)
    tensors = load_file(tmp_path / "fused" / WEIGHTS_FILE)
    apart: dict[str, torch.Tensor] = {}
    for name, down in tensors.items():
        if ".experts." not in name or "lora_A" not in name:
            continue
        layer, up = name.split(".experts.")[0], tensors[name.replace("lora_A", "lora_B")]
        halves = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64)} if "base_layer" in name else None
        for expert, lines in enumerate(down.chunk(8)):
            for piece, rows in (halves or {"down_proj": slice(None)}).items():
                stem = f"{layer}.experts.{expert}.{piece}"
                apart[f"{stem}.lora_A.weight"] = lines.clone()
                apart[f"{stem}.lora_B.weight"] = up[rows, expert::8].contiguous()
    folder = tmp_path / "apart"
    folder.mkdir()
    save_file({**{name: t for name, t in tensors.items() if ".experts." not in name}, **apart}, folder / WEIGHTS_FILE)
    patterns = {"gate_proj": 8, "up_proj": 8}
    config = json.loads((tmp_path / "fused" / CONFIG_FILE).read_text()) | {"rank_pattern": patterns}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    ref = AdapterRef("apart", digest_of(folder), str(folder))
    asked = [ask("fused", PROMPTS[0], fused), ask("apart", PROMPTS[0], ref)]
    found = answers(base, asked, lora_experts=True)
    assert found["apart"].error is None
    assert found["apart"].content() == found["fused"].content()


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_adapters_in_eight_bits(model: Path, adapters: list[AdapterRef], tmp_path: Path, stored: torch.dtype) -> None:
    """Matrices with a scale for each row are what they stand for; int8 without scales is refused."""
    folders = {name: tmp_path / name for name in ("packed", "plain", "bare")}
    files: dict[str, dict[str, torch.Tensor]] = {name: {} for name in folders}
    for name, matrix in load_file(Path(adapters[0].path) / WEIGHTS_FILE).items():
        scale = matrix.abs().amax(1, keepdim=True) / (127 if stored == torch.int8 else 448)
        packed = (matrix / scale).round().to(stored) if stored == torch.int8 else (matrix / scale).to(stored)
        files["packed"] |= {name: packed, f"{name}_scale": scale}
        files["plain"][name] = packed.float() * scale
        files["bare"][name] = packed
    refs = {}
    for name, folder in folders.items():
        folder.mkdir()
        save_file(files[name], folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text((Path(adapters[0].path) / CONFIG_FILE).read_text())
        refs[name] = AdapterRef(name, digest_of(folder), str(folder))
    found = answers(model, [ask(name, PROMPTS[0], ref) for name, ref in refs.items()])
    assert found["packed"].content() == found["plain"].content()
    assert found["plain"].error is None
    if stored == torch.int8:
        assert "is int8 but has no" in str(found["bare"].error)
    else:
        assert found["bare"].error is None, "eight-bit floats may stand for themselves"


def test_slots_by_rank(model: Path, adapters: list[AdapterRef]) -> None:
    """Two buckets give the bits of one; an adapter of rank 8 gets the slot that has room for it."""
    ranked = [structs.replace(ref, rank=rank) for ref, rank in zip(adapters, (4, 8, 4), strict=True)]
    requests = mixed(ranked)
    expected = answers(model, requests)
    core = make_engine(model, **{**SETTINGS, "lora_slots": "4x2,8x1"})
    found = run_all(core, requests)
    alone = run_all(core, requests[-1:])
    core.executor.shutdown()
    assert {name: answer.content() for name, answer in found.items()} == {
        name: answer.content() for name, answer in expected.items()
    }
    assert alone[requests[-1].request_id].content() == found[requests[-1].request_id].content()


@pytest.mark.parametrize("base", ["Q4_K", "Q8_0", "int8", "int4"])
def test_packed_and_quantized_bases(tmp_path: Path, base: str) -> None:
    """An adapter in float16 over packed weights: together is alone, and the adapter changes what is said."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "auto", "lora_dtype": "auto"}
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
