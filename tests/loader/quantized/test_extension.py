"""A quantized checkpoint is one file and one registry line: `int4_groups.py` beside this file, and `FORMAT` below."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.layers.quant.packed import PackedLinear
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.loader.quantized.registry import QUANTIZED
from quire.planning.engine_plan import plan_engine
from quire.types.errors import CheckpointError, ConfigError
from quire.worker.direct import DirectModel
from tests.e2e.tiny import make_model
from tests.loader.quantized.int4_groups import GROUP, INT4_GROUPS

FORMAT = {"int4-groups": "tests.loader.quantized.int4_groups:Int4Groups"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYER = "model.layers.0.mlp.down_proj"
TOKENS = [3, 9, 27, 81, 43, 29, 7]


@pytest.fixture(autouse=True)
def line() -> Iterator[None]:
    with QUANTIZED.with_entries(FORMAT, only=True):
        yield


def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(what is stored of a matrix, the values that this stands for)."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales[..., None]).round().clamp(-8, 7).add(8)
    words = (codes.flatten(1).long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    words = (words - ((words >> 31) << 32)).to(torch.int32)
    stored = {"packed": words, "scale": scales, "shape": torch.tensor(weight.shape)}
    return stored, ((codes - 8) * scales[..., None]).flatten(1)


class Folders:
    """The same model twice: quantized, and with the values that the quantized one stands for."""

    def __init__(self, root: Path) -> None:
        self.plain = make_model(root / "plain", "qwen2", initializer_range=0.05)
        self.quantized = root / "quantized"
        self.quantized.mkdir()
        self.tensors: dict[str, Tensor] = {}
        exact = load_file(self.plain / "model.safetensors")
        for name, tensor in list(exact.items()):
            if not name.endswith(tuple(f"{leaf}.weight" for leaf in PROJECTIONS)):
                self.tensors[name] = tensor
                continue
            stored, exact[name] = quantize(tensor)
            self.tensors |= {f"{name}_{role}": value for role, value in stored.items()}
        save_file(exact, self.plain / "model.safetensors")
        self.config = json.loads((self.plain / "config.json").read_text())
        self.write(self.tensors)

    def write(self, tensors: dict[str, Tensor], method: Any = "int4-groups") -> Path:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, self.quantized / "model.safetensors"
        )
        config = {**self.config, "quantization_config": {"quant_method": method}}
        (self.quantized / "config.json").write_text(json.dumps(config))
        return self.quantized


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("int4"))


@pytest.fixture
def broken(folders: Folders) -> Iterator[Folders]:
    yield folders
    folders.write(folders.tensors)


def settings(folder: Path, **flags: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(folder), max_model_len=64, kv_cache_dtype="float32", **flags)


@pytest.mark.parametrize("flags", [{}, {"quantization": "none"}], ids=str)
def test_it_answers_as_the_dequantized_model_does(folders: Folders, flags: dict[str, str]) -> None:
    with torch.inference_mode():
        mine, theirs = (DirectModel(settings(folder, **flags)) for folder in (folders.quantized, folders.plain))
        torch.testing.assert_close(mine.logits(TOKENS), theirs.logits(TOKENS), atol=1e-6, rtol=1e-5)


def test_logical_tensors_have_the_names_of_the_plain_model(folders: Folders) -> None:
    logical, plain = (open_checkpoint(resolve_model(str(path))) for path in (folders.quantized, folders.plain))
    assert list(logical.tensors()) == list(plain.tensors())
    info = logical.tensors()[f"{LAYER}.weight"]
    assert (info.scheme, info.shape) == (INT4_GROUPS, plain.tensors()[f"{LAYER}.weight"].shape)
    assert info.num_bytes == sum(
        folders.tensors[f"{LAYER}.weight_{role}"].nbytes for role in ("packed", "scale", "shape")
    )
    assert torch.equal(logical.get(f"{LAYER}.weight"), plain.get(f"{LAYER}.weight"))


def test_it_is_not_quantized_again(folders: Folders) -> None:
    with pytest.raises(
        ConfigError, match=r"quantization is 'int8', .* is quantized already .weights in it are UINT4"
    ):
        plan_engine(settings(folders.quantized, quantization="int8"))


def test_weights_take_the_planned_bytes(folders: Folders) -> None:
    plan, model = plan_engine(settings(folders.quantized)), DirectModel(settings(folders.quantized)).model
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for method in (module for module in model.modules() if isinstance(module, PackedLinear)):
        held += sum(matrix.num_bytes for matrix in method.matrices)
    assert held == next(entry.num_bytes for entry in plan.ledger.entries if entry.name == "weights")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, rf"{LAYER}\.weight_scale is missing"),
        (
            {"weight_packed": None},
            rf"{LAYER}\.weight_shape is of torch\.int64, which the quantization_config says nothing of",
        ),
        ({"weight_scale": torch.ones(3, 2)}, rf"{LAYER}\.weight_scale has the shape \[3, 2\] instead of \[64, "),
        ({"weight_shape": torch.tensor([64, 8])}, rf"{LAYER}\.weight_packed has the shape .* instead of \[64, 1\]"),
        ({"weight_scale": torch.ones(64, 6).half()}, rf"{LAYER}\.weight_scale is of torch\.float16 instead of"),
        ({"weight": torch.ones(64, 96)}, rf"{LAYER}\.weight is stored twice"),
    ],
    ids=["no scales", "no weight", "wrong scales", "wrong shape", "wrong type", "twice"],
)
def test_stored_tensors_that_make_no_matrix_are_named(
    broken: Folders, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = {**broken.tensors, **{f"{LAYER}.{leaf}": tensor for leaf, tensor in changes.items()}}
    folder = broken.write({name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=message):
        plan_engine(settings(folder))


def test_a_stored_tensor_may_be_ignored_by_name(broken: Folders) -> None:
    folder = broken.write({**broken.tensors, f"{LAYER}.weight_observer": torch.ones(3)})
    assert f"{LAYER}.weight_observer" not in open_checkpoint(resolve_model(str(folder))).tensors()


@pytest.mark.parametrize("method", ["gptq", 5])
def test_an_unknown_quantization_is_named_beside_the_known_ones(broken: Folders, method: Any) -> None:
    broken.write(broken.tensors, method)
    with pytest.raises(CheckpointError, match=r"quantization_config.*known: int4-groups; use|quantization_config is"):
        plan_engine(settings(broken.quantized))
