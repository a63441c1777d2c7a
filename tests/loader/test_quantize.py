"""Written checkpoints: read back to what was quantized, in the form that compressed-tensors has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.cli.main import main
from quire.cli.quantize import SCHEMES
from quire.config.engine import EngineConfig
from quire.layers.scheme import StoredMatrix
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.loader.quantize import WRITTEN
from quire.worker.direct import DirectModel
from tests.e2e.tiny import make_model

# How far a matrix of normal numbers may be off, as a part of its norm.
BOUNDS = {
    "w8a8-int8": 0.01,
    "w8a8-fp8": 0.03,
    "w8a16": 0.01,
    "w4a16": 0.11,
    "w4a16-asym": 0.1,
    "nvfp4": 0.11,
    "mxfp4": 0.14,
}
FORMATS = {
    "w8a8-int8": "int-quantized",
    "w8a8-fp8": "float-quantized",
    "w8a16": "pack-quantized",
    "w4a16": "pack-quantized",
    "w4a16-asym": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen2", dtype="bfloat16", initializer_range=0.05)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_dtype": "float32", "skip_tokenizer_init": True}
    with torch.inference_mode():
        return DirectModel(EngineConfig.from_flat(model=str(folder), **settings)).logits([3, 9, 27, 81, 43])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_written_checkpoint_is_close_to_the_model(model: Path, tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", scheme, "--out", str(folder)]) == 0
    written, plain = (open_checkpoint(resolve_model(str(path))) for path in (folder, model))
    assert list(written.tensors()) == list(plain.tensors())
    for name in plain.tensors():
        stored, expected = written.stored(name), plain.get(name).float()
        assert isinstance(stored, StoredMatrix) == name.endswith("proj.weight"), name
        values = stored.tensor() if isinstance(stored, StoredMatrix) else stored.float()
        assert (values - expected).norm() <= BOUNDS[scheme] * expected.norm(), name
        assert isinstance(stored, StoredMatrix) or torch.equal(values, expected), name
    expected = logits(model)
    assert (logits(folder) - expected).norm() < 4 * BOUNDS[scheme] * expected.norm()
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == FORMATS[scheme]
    assert config["ignore"] == ["lm_head"]
    assert (folder / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_extreme_matrices_stay_finite(scheme: str) -> None:
    weight = torch.zeros(16, 64)
    weight[1] = 3e4
    weight[2, 5] = 1e-20
    for value in (weight, torch.zeros(16, 64)):
        for dtype in (torch.float16, torch.bfloat16):
            group = 32 if scheme.startswith("w4a16") else WRITTEN[scheme].group_size
            parts = WRITTEN[scheme].quantize(value, dtype, group)
            assert all(part.float().isfinite().all() for part in parts.values() if part.dtype != torch.uint8)


def test_the_command_offers_every_scheme() -> None:
    assert tuple(WRITTEN) == SCHEMES


def test_the_file_is_one_that_safetensors_reads(model: Path, tmp_path: Path) -> None:
    main(["quantize", str(model), "--scheme", "w4a16", "--group-size", "32", "--out", str(tmp_path / "out")])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    assert tensors[f"{layer}.weight_packed"].shape == (64, 96 // 8)
    assert tensors[f"{layer}.weight_scale"].shape == (64, 3)
    assert tensors[f"{layer}.weight_shape"].tolist() == [64, 96]
    assert [path.name for path in (tmp_path / "out").glob("*.data")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w4a16", "--group-size", "40"], "down_proj.weight has 96 inputs, which groups of 40 do not"),
        (["--scheme", "w8a16", "--group-size", "32"], "w8a16 has a scale per output; leave --group-size out"),
        (["--scheme", "mxfp4", "--group-size", "16"], "mxfp4 always has 32; leave --group-size out"),
        (["--scheme", "w4a16", "--group-size", "0"], "group_size is 0; it must be at least 1"),
        (["--scheme", "w4a16", "--text", "/nowhere"], "text is '/nowhere', which cannot be read"),
        (["--scheme", "w4a16", "--load-format", "dummy"], "which has no weights to quantize; leave --load-format"),
    ],
)
def test_what_cannot_be_done_is_said(
    model: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), "--out", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_with_files_is_left_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), "--scheme", "w4a16", "--out", str(model)]) == 1
    assert "is not an empty folder; name another one" in capsys.readouterr().err
