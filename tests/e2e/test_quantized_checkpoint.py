"""Quantized checkpoints as a user runs them: `quire fit`, `quire serve` and `quire quantize`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.cli.quantize import SCHEMES, perplexity
from quire.config.engine import EngineConfig
from quire.loader.hub import resolve_model
from tests.e2e.serving import start
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.loader.gguf_experts import write_expert_gguf
from tests.loader.quantized.test_checkpoints import ROOT
from tests.models.zoo import MIXTURES

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Most that the perplexity of the default model may rise, in percent; stated in docs/guides/quantization.md.
RISES = {
    **{"w8a8-int8": 2.0, "w8a16": 1.0, "w8a8-fp8": 3.0},
    **{"w4a16-asym": 35.0, "nvfp4": 35.0, "w4a16": 50.0, "mxfp4": 70.0},
}


def gptq(folder: Path) -> Path:
    folder = Path(shutil.copytree(ROOT / "gptq", folder / "gptq"))
    write_tokenizer(folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {token: index for token, index in words["model"]["vocab"].items() if index < 32}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


def gpt_oss(folder: Path) -> Path:
    """As it is published: experts in MXFP4, everything else in floats."""
    tiny = next(tiny for tiny in MIXTURES if tiny.name == "gpt-oss")
    replace(tiny, keys={**tiny.keys, "intermediate_size": 32}).make(folder)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return folder


def mixtral_gguf(folder: Path) -> Path:
    write_expert_gguf("mixtral", folder / "mixtral.gguf", "Q8_0")
    return folder / "mixtral.gguf"


@pytest.mark.parametrize(
    ("make", "kept"),
    [(gptq, "code4"), (gpt_oss, "e2m1"), (mixtral_gguf, "code8")],
    ids=["gptq", "gpt-oss", "mixtral-gguf"],
)
def test_served_checkpoints_answer_the_openai_client(
    make: Callable[[Path], Path], kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(make(tmp_path))
    assert main(["fit", model]) == 0
    assert "M parameters of" in capsys.readouterr().out
    running = start(model, "--served-model-name", "tiny")
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            answers = [
                client.completions.create(model="tiny", prompt=[3, 9, 27], max_tokens=6, temperature=0)
                for _ in range(2)
            ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        assert answers[0].usage is not None
        assert answers[0].usage.prompt_tokens == 3
        assert kept in running.wait_line("weights: (.*)")[1]
    finally:
        assert running.stop() == 0


@pytest.mark.nightly
def test_activations_of_8_bits_keep_the_perplexity_of_the_default_model() -> None:
    text, settings = PAGE.read_text()[:6000], {"max_model_len": 1024, "kv_cache_dtype": "float32"}
    of = {
        name: perplexity(EngineConfig.from_flat(model="smollm2", activations=name, **settings), text)
        for name in ("float32", "int8")
    }
    assert abs(of["int8"] / of["float32"] - 1) < 0.005, of


def test_the_bounds_are_those_of_the_guide_and_of_all_schemes() -> None:
    guide = (PAGE.parent / "guides" / "quantization.md").read_text()
    (line,) = re.findall(r"^The tests hold .*?:\n(.*?)\.$", guide, flags=re.M | re.S)
    assert {name: float(most) for name, most in re.findall(r"(\S+) by (\d+) %", line)} == RISES
    assert set(RISES) == set(SCHEMES)


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", RISES)
def test_the_default_model_keeps_its_perplexity(scheme: str, tmp_path: Path) -> None:
    text, settings = PAGE.read_text()[:6000], {"max_model_len": 1024, "kv_cache_dtype": "float32"}
    config = EngineConfig.from_flat(model="smollm2", **settings)
    assert main(["quantize", "smollm2", "--scheme", scheme, "--out", str(tmp_path / "out")]) == 0
    stored = EngineConfig.from_flat(
        model=str(tmp_path / "out"), tokenizer=str(resolve_model("smollm2").path), **settings
    )
    before, after = perplexity(config, text), perplexity(stored, text)
    assert 100 * (after / before - 1) < RISES[scheme]
