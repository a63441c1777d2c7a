from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.loader.safetensors import SafetensorsCheckpoint, read_header
from quire.types.errors import CheckpointError

TENSORS = {
    "model.layers.10.w": torch.arange(6, dtype=torch.float32).view(2, 3),
    "model.layers.2.w": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.zeros(2, 2, dtype=torch.float16),
}


def write_folder(folder: Path, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    if shards == 1:
        save_file(TENSORS, folder / "model.safetensors")
        return folder
    weight_map = {}
    for index, (name, tensor) in enumerate(TENSORS.items()):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_all_tensors_come_back_in_natural_order(tmp_path: Path, shards: int) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path, shards))
    assert list(checkpoint.tensors()) == ["lm_head.weight", "model.layers.2.w", "model.layers.10.w"]
    for name, info in checkpoint.tensors().items():
        tensor = checkpoint.get(name)
        assert torch.equal(tensor, TENSORS[name])
        assert (info.shape, info.dtype, info.num_bytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"]}


def test_one_file_of_another_name_is_enough(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).tensors()) == set(TENSORS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("safetensors")) / "model.safetensors"


@settings(max_examples=80)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(whole: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    cut = whole.with_name("cut.safetensors")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors .*(truncated|corrupt)"):
        read_header(cut)


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_header_never_gives_another_error(whole: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    damaged = whole.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    try:
        infos, starts = read_header(damaged)
    except CheckpointError:
        return
    assert all(0 <= starts[name] <= starts[name] + info.num_bytes <= len(content) for name, info in infos.items())


def test_a_truncated_file_error_names_both_sizes(tmp_path: Path) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=f"{len(content)} bytes but the file has {len(content) - 5}; download"):
        SafetensorsCheckpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files .*model-00002-of-00003\.safetensors; down"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_that_names_other_tensors_is_refused(tmp_path: Path) -> None:
    index = write_folder(tmp_path, 3) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.layers.99.w"] = weight_map["lm_head.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"it lacks model\.layers\.99\.w"):
        SafetensorsCheckpoint(tmp_path)
    weight_map["other"] = weight_map.pop("model.layers.99.w")
    del weight_map["other"]
    save_file({**TENSORS}, tmp_path / weight_map["lm_head.weight"])
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="it also has model"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"config\.json is missing"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": []}', "has no weight_map"),
    ],
)
def test_a_wrong_json_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_folder(tmp_path, 3)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_weights_says_what_it_has(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: convert the weights to safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_an_absent_tensor_and_a_file_that_vanished_are_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path))
    with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
        checkpoint.get("nothing")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        checkpoint.get("lm_head.weight")
