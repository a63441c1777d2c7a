"""Quantized checkpoints as a user runs them: `quire fit`, `quire serve` and `quire quantize`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openai
import pytest

from quire.cli.main import main
from quire.cli.quantize import perplexity
from quire.config.engine import EngineConfig
from quire.loader.hub import resolve_model
from tests.e2e.serving import start
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.loader.quantized.test_checkpoints import ROOT

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# Most that the perplexity of the default model may rise, in percent; see docs/quantization.md.
RISES = {"w8a8-int8": 1.0, "w8a16": 1.0, "w4a16-asym": 35.0}


def test_a_served_gptq_checkpoint_answers_the_openai_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ROOT / "gptq", tmp_path / "gptq"))
    write_tokenizer(folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {token: index for token, index in words["model"]["vocab"].items() if index < 32}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert main(["fit", str(folder)]) == 0
    assert "M parameters of" in capsys.readouterr().out
    running = start(str(folder), "--served-model-name", "tiny")
    try:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            answers = [
                client.completions.create(model="tiny", prompt=[3, 9, 27], max_tokens=6, temperature=0)
                for _ in range(2)
            ]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        assert answers[0].usage is not None
        assert answers[0].usage.prompt_tokens == 3
    finally:
        assert running.stop() == 0


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
