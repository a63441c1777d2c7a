"""A config.json that was damaged or edited is refused with the key, its value and what it may be."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from quire.loader.config_schema import ConfigSchema, LayeredRopeSchema
from quire.loader.hub import ModelSource
from quire.loader.model_config import load_config
from quire.models.registry import describe
from quire.types.errors import CheckpointError, ModelError
from tests.models.architectures import GENERATORS, own_keys
from tests.models.zoo import EXPERT_KEYS, STATE_KEYS

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 199,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "sliding_window": 16,
    "use_sliding_window": True,
    **EXPERT_KEYS,
    **{key: value for key, value in STATE_KEYS.items() if key != "head_dim"},
    "layers_block_type": ["mamba", "attention", "mamba"],
}
ODD: list[Any] = [
    *(0, -1, 1, 3, 1.5, 10**9, 10**18, 1e300, float("nan"), float("inf"), True, None, "", "x", "12"),
    *([], [1], ["x"], [0, 1, 1], {}, {"x": 1}, {"rope_type": "linear", "factor": 1e20}, {"rope_type": 7}),
    *({"full_attention": 3}, {"full_attention": {"factor": "x"}}, {"rope_type": "yarn", "factor": []}),
]


def load(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return load_config(ModelSource(path=folder, kind="folder", name="tiny"))


@cache
def taken_and_refused() -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    """The odd values that the schema lets through, and the errors of the others; the same for all architectures."""
    taken, refused = [], []
    for key in ConfigSchema.__struct_fields__:
        for value in ODD:
            with TemporaryDirectory() as folder:
                try:
                    load(Path(folder), {**CONFIG, key: value})
                    taken.append((key, value))
                except CheckpointError as error:
                    refused.append((key, str(error)))
    return taken, refused


def test_what_the_schema_refuses_is_named() -> None:
    taken, refused = taken_and_refused()
    assert len(refused) > len(taken) > 0
    for key, message in refused:
        assert any(name in message for name in (key, "rope", "max_position_embeddings"))


@pytest.mark.parametrize("architecture", GENERATORS)
def test_any_value_is_taken_or_refused_by_name(architecture: str) -> None:
    own = own_keys(architecture, 3)
    errors: list[tuple[str, str]] = []
    for key, value in taken_and_refused()[0]:
        if key == "architectures":
            continue  # another mistake, with another message
        try:
            describe({**CONFIG, **own, "architectures": [architecture], key: value})
        except ModelError as error:
            errors.append((key, str(error)))
    for key, message in errors:
        assert any(name in message for name in (key, "rope", "max_position_embeddings"))


def test_the_message_has_file_value_and_bounds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers is 1000000000 .*<= 10000") as caught:
        load(tmp_path, {**CONFIG, "num_hidden_layers": 10**9})
    assert "download the file again" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 1.0),  # YaRN divides by its logarithm
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "mscale": float("nan")}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "mscale_all_dim": -40.0}),
        ("moe_layer_freq", 0),
        ("moe_layer_freq", [0, 1, 1]),
    ],
)
def test_what_gives_no_numbers_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is "):
        load(tmp_path, {**CONFIG, key: value})


def test_heads_that_have_no_size(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "hidden_size": 3}
    with pytest.raises(ModelError, match="hidden_size is 3, which 4 heads cannot share"):
        describe(load(tmp_path, config))


def test_every_key_that_architectures_read_is_known() -> None:
    reads = re.compile(r"(?:config|read|given)(?:\.get\(|\.flag\(|\.one_of\(|\[)\"(\w+)\"")
    files = [*ROOT.glob("quire/models/*.py"), *ROOT.glob("quire/layers/rope/*.py")]
    keys = {key for file in files for key in reads.findall(file.read_text(encoding="utf-8"))}
    assert {"hidden_size", "rope_theta", "factor"} <= keys
    known = {*ConfigSchema.__struct_fields__, *LayeredRopeSchema.__struct_fields__}
    assert keys - known == {"use_bidirectional_attention"}, "which only has to be absent"


def test_keys_that_are_not_read_may_be_anything(tmp_path: Path) -> None:
    config = {**CONFIG, "vision_config": 7, "initializer_range": "x"}
    assert load(tmp_path, config) == config


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_more_experts_than_any_model_has_are_refused_at_once(key: str, tmp_path: Path) -> None:
    """Each has a name for each of its matrices in each layer, and all would be listed as missing."""
    with pytest.raises(CheckpointError, match=rf"{key} is 1048576 \(Expected `int` <= 4096"):
        load(tmp_path, {**CONFIG, key: 1 << 20})
    assert load(tmp_path, {**CONFIG, key: 4096})[key] == 4096
