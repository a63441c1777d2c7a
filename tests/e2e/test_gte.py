"""GTE as it is published (`NewModel`): the names and config keys of its own code, beside transformers' model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.registry import model_class
from quire.types.errors import ModelError
from quire.types.sampling import PoolingParams
from tests.e2e.test_classifiers import make_classifier
from tests.e2e.test_encoders import WHOLE, engine, make_encoder
from tests.e2e.test_pooling import PROMPTS, pool, vector

KEYS = {
    "model_type": "new",
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "rope_theta": 500.0,
    "rope_parameters": None,
}


def publish(folder: Path, architecture: str, *, prefix: str = "new.", packed: bool = True, **keys: Any) -> None:
    """Give what transformers saved the names and keys of the published code."""
    stored = load_file(folder / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        name = name.removeprefix("gte.")
        name = name if name.startswith("classifier") else prefix + name
        if "qkv_proj" in name and not packed:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace("qkv_proj", f"{part}_proj")] = piece.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    found = {**json.loads(path.read_text()), **KEYS, "pack_qkv": packed, "architectures": [architecture], **keys}
    path.write_text(json.dumps(found))


def rotate_by(model: torch.nn.Module, frequencies: torch.Tensor) -> None:
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    rotary.inv_freq.copy_(frequencies)


def ntk(factor: float, mixed_b: float | None) -> torch.Tensor:
    """Frequencies of a head of 16 dimensions: of the published paper, one by one."""
    found = []
    for index in range(8):
        if mixed_b is None:
            found.append((500.0 * factor) ** (-index / 8) / factor ** (2 / 16))
        else:
            found.append(500.0 ** (-index / 8) / factor ** (((index + 1) / 8) ** mixed_b))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("prefix", "packed", "scaling"),
    [
        ("new.", True, None),
        ("", False, {"type": "ntk", "factor": 4.0}),
        ("new.", True, {"type": "ntk", "factor": 4.0, "mixed_b": 0.625}),
    ],
)
def test_hidden_states(prefix: str, packed: bool, scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, "Gte")
    publish(tmp_path, "NewModel", prefix=prefix, packed=packed, rope_scaling=scaling)
    rotate_by(theirs, ntk(scaling["factor"], scaling.get("mixed_b")) if scaling else ntk(1.0, None))
    for tokens, output in zip(PROMPTS, pool(engine(tmp_path), PROMPTS, WHOLE), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).last_hidden_state[0]
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)


def test_classes(tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, "Gte", "SequenceClassification")
    publish(tmp_path, "NewForSequenceClassification")
    rotate_by(theirs, ntk(1.0, None))
    params = PoolingParams(task="classify", pooling="cls", head="classify", activation="none")
    for tokens, output in zip(PROMPTS, pool(engine(tmp_path), PROMPTS, params), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=2e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("position_embedding_type", "absolute"), ("layer_norm_type", "rms_norm"), ("logn_attention_scale", True)],
)
def test_what_published_code_can_do_besides_is_refused(key: str, value: Any) -> None:
    config = {**KEYS, key: value, "architectures": ["NewModel"]}
    with pytest.raises(ModelError, match=f"{key} is {value!r} in the config of a GTE encoder"):
        model_class(config).describe(config)
