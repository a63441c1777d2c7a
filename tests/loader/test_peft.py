"""Adapters that do not fit: refused by tensor and fix, before anything changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.layers.adapters import AdapterSizes
from quire.layers.linear import Linear
from quire.loader.peft import read_adapter
from quire.models.base import Model
from quire.ops.base import Target
from quire.planning.engine_plan import plan_engine
from quire.types.errors import AdapterError, CheckpointError, ConfigError
from quire.worker.worker import load_model
from tests.e2e.test_lora import make_adapter
from tests.e2e.tiny import make_model

PREFIX = "base_model.model.model.layers.0"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("peft") / "base", "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    config = EngineConfig.from_flat(model=str(folder), enable_lora=True, max_lora_rank=8)
    return load_model(plan_engine(config), config)


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    return Path(make_adapter(folder, folder.parent / "adapter", 1).path)


def changed(adapter: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return folder


def read(folder: Path, model: Model) -> None:
    read_adapter(folder, model, 8, torch.float32)


def test_every_matrix_has_its_place(adapter: Path, model: Model) -> None:
    found = read_adapter(adapter, model, 8, torch.float32)
    linears = [name for name, layer in model.named_modules() if isinstance(layer, Linear) and layer.role == "linear"]
    assert set(found.layers) == set(linears)
    assert {len(packed.down) for packed in found.layers.values()} == {1, 2, 3}, "o and down, gate and up, q, k and v"
    assert all(packed.down.any(-1).sum() == 4 * len(packed.down) for packed in found.layers.values())
    assert found.rank == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{PREFIX}.mlp.up_proj.lora_B.weight"), "lora_A or lora_B alone"),
        (lambda t: t.update(extra=torch.ones(2)), "extra"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 199)}),
            "embed_tokens has lora_A or lora_B alone",
        ),
        (
            lambda t: t.update({f"{PREFIX}.mlp.up_proj.lora_A.weight_scale": torch.ones(3)}),
            r"has 3 scales; a matrix of \[4, 64\] takes 1 or 4",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(199, 64)}),
            "save_embedding_layers=False",
        ),
        (
            lambda t: t.update(
                {
                    f"{PREFIX}.mlp.experts.base_layer.lora_A.weight": torch.ones(4, 64),
                    f"{PREFIX}.mlp.experts.base_layer.lora_B.weight": torch.ones(96, 4),
                }
            ),
            "mlp.experts.base_layer holds experts",
        ),
        (lambda t: t.update({f"{PREFIX}.mlp.up_proj.lora_A.weight": torch.ones(4, 63)}), r"\[4, 63\]"),
        (lambda t: t.update({f"{PREFIX}.mlp.up_proj.lora_B.weight": torch.ones(96, 5)}), r"\[96, 5\]"),
        (lambda t: t.update({f"{PREFIX}.mlp.up_proj.lora_A.weight": torch.full((4, 64), torch.nan)}), "not finite"),
        (
            lambda t: t.update({f"{PREFIX}.mlp.up_proj.lora_B.weight": torch.full((96, 4), 1e5)}),
            "too large for torch.float16; set --lora-dtype float32",
        ),
        (
            lambda t: t.update(
                {
                    f"{PREFIX}.mlp.other.lora_A.weight": torch.ones(4, 64),
                    f"{PREFIX}.mlp.other.lora_B.weight": torch.ones(96, 4),
                }
            ),
            "mlp.other is no linear layer",
        ),
        (lambda t: t.clear(), "no LoRA matrices"),
    ],
)
def test_tensors_that_do_not_fit(
    adapter: Path, model: Model, tmp_path: Path, change: Callable[[Tensors], object], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read(changed(adapter, tmp_path, change), model)


def test_a_rank_above_the_limit(adapter: Path, model: Model) -> None:
    with pytest.raises(AdapterError, match="--max-lora-rank is 3"):
        read_adapter(adapter, model, 3, torch.float32)


def test_damaged_files(adapter: Path, model: Model, tmp_path: Path) -> None:
    folder = changed(adapter, tmp_path, lambda tensors: None)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        read(folder, model)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "alpha_pattern": {"(": 2}}))
    with pytest.raises((AdapterError, CheckpointError)):
        read(folder, model)


def test_slots_have_a_type_that_their_kernels_take() -> None:
    buckets, gpu = ((16, 2),), Target("cuda", torch.bfloat16)
    found = {
        kept: AdapterSizes(buckets, dtype=kept).dtype_on(Target("cpu")) for kept in ("auto", "float32", "float16")
    }
    assert found == {"auto": torch.float16, "float32": torch.float32, "float16": torch.float16}
    assert AdapterSizes(buckets).times(3).dtype_on(gpu) == torch.bfloat16
    with pytest.raises(ConfigError, match="lora_dtype is float32 but adapters on cuda have --dtype"):
        AdapterSizes(buckets, dtype="float32").times(2).dtype_on(gpu)
