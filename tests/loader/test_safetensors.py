from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors
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


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "any.safetensors"


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


def file_with(path: Path, header: object, num_bytes: int) -> Path:
    """A file with any header, before so many bytes of data."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes))
    return path


def entry(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t": entry([2.0], 0, 8)}, "tensor 't' is .*Expected `int`, got `float` - at `\\$.shape"),
        ({"t": entry([1.5], 0, 6)}, "tensor 't' is .*shape"),
        ({"t": entry([-1, -2], 0, 8)}, "tensor 't' is .*>= 0.*shape"),
        ({"t": entry([True, 2], 0, 8)}, "tensor 't' is .*shape"),
        ({"t": entry(["2"], 0, 8)}, "tensor 't' is .*shape"),
        ({"t": entry([2], 0.0, 8.0)}, "tensor 't' is .*data_offsets"),
        ({"t": entry([2], -8, 0)}, "tensor 't' is .*data_offsets"),
        ({"t": {**entry([2], 0, 8), "data_offsets": [0, 4, 8]}}, "tensor 't' is .*data_offsets"),
        ({"t": entry([2], 0, 8, dtype=["F32"])}, "tensor 't' is .*dtype"),
        ({"t": entry([2], 0, 8, dtype="F3")}, "tensor 't' has type F3"),
        ({"t": [0, 8]}, "tensor 't' is"),
        ({"t": None}, "tensor 't' is"),
        ({"t": entry([2**70], 0, 8)}, "tensor 't' of shape .* needs 4722366482869645213696"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "tensor 'b' begins at 4 .* 'a' ends at 8"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, "tensor 'b' begins at 0 .* 'a' ends at 8"),
        ({"a": entry([1], 0, 4), "b": entry([1], 4, 8), "c": entry([0], 2, 2)}, "tensor 'c' begins at 2"),
        ({"a": entry([1], 4, 8)}, "tensor 'a' begins at 4 .* at 0"),
        (b"[]", "corrupt header"),
        (b"7", "corrupt header"),
        (b'{"t": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "corrupt header .*nested too deeply"),
        (b'{"t": ' + b'{"t": ' * 100_000 + b"1" + b"}" * 100_001, "corrupt header .*nested too deeply"),
        (b'{"\xff": 1}', "corrupt header"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path: Path, header: object, message: str) -> None:
    path = file_with(tmp_path / "lying.safetensors", header, 8)
    with pytest.raises(CheckpointError, match=rf"lying\.safetensors.*{message}.*(download|BOOL$)"):
        read_header(path)


def test_a_header_larger_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(2 * 10**9)  # a sparse file: nothing is written
    with pytest.raises(CheckpointError, match=r"header of 1000000000 bytes.* 100000000"):
        read_header(path)


DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"}
SMALL = st.integers(-2, 12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | SMALL | st.floats() | st.sampled_from([2**31, 2**63, 2**64, 10**30]) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
ENTRIES = st.builds(
    entry,
    st.lists(SMALL, max_size=3) | ANYTHING,
    SMALL | ANYTHING,
    SMALL | ANYTHING,
    st.sampled_from(["F32", "BF16", "U8", "BOOL", "F64"]) | ANYTHING,
)


@st.composite
def packed_headers(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors side by side, as they should be, of which some entry may then be changed."""
    header: dict[str, Any] = {}
    begin = 0
    for name in draw(st.lists(st.text(max_size=3), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype, size = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("F8_E5M2", 1)]))
        end = begin + math.prod(shape) * size
        header[name] = entry(shape, begin, end, dtype)
        begin = end
    if header and draw(st.booleans()):
        changed = draw(st.sampled_from(sorted(header)))
        header[changed] = draw(ENTRIES | ANYTHING)
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(), st.text(), max_size=2))
    return header


@settings(max_examples=300, deadline=None)
@given(packed_headers() | st.dictionaries(st.text(max_size=3), ENTRIES | ANYTHING, max_size=3), st.integers(0, 40))
def test_any_header_is_read_as_the_format_defines_or_refused(
    scratch: Path, header: dict[str, Any], spare: int
) -> None:
    """safetensors' own reader is the judge, except that Quire knows fewer types."""
    ends = [e["data_offsets"][1] for e in header.values() if isinstance(e, dict) and "data_offsets" in e]
    sizes = [end for end in ends if isinstance(end, int) and 0 <= end < 1000]
    path = file_with(scratch, header, max(sizes, default=0) + max(0, spare - 30))
    content = path.read_bytes()
    try:
        theirs = dict(safetensors.deserialize(content))
    except (safetensors.SafetensorError, OverflowError):
        theirs = None
    if theirs is None or any(tensor["dtype"] not in DTYPES for tensor in theirs.values()):
        with pytest.raises(CheckpointError):
            read_header(path)
        return
    infos, starts = read_header(path)
    assert infos.keys() == theirs.keys()
    for name, info in infos.items():
        assert list(info.shape) == theirs[name]["shape"]
        assert content[starts[name] : starts[name] + info.num_bytes] == bytes(theirs[name]["data"])


@pytest.mark.parametrize(
    "file_name", ["../secret.safetensors", "/etc/passwd", "a/../../x.safetensors", "", ".", 7, None, ["x"], {"a": 1}]
)
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path: Path, file_name: object) -> None:
    folder = write_folder(tmp_path / "model", 3)
    save_file({"stolen": torch.zeros(2)}, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = {**json.loads(index.read_text())["weight_map"], "stolen": file_name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map has 'stolen' in .*; it must name a file in"):
        SafetensorsCheckpoint(folder)


def test_files_of_the_hub_cache_are_links_and_are_followed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", 3)
    for file in folder.glob("*.safetensors"):
        blob = file.rename(tmp_path / f"blob-{file.name}")
        file.symlink_to(blob)
    assert set(SafetensorsCheckpoint(folder).tensors()) == set(TENSORS)


def test_a_number_of_any_length_may_be_part_of_a_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    names = ["a.2", "a.10", f"a.{'9' * 5000}"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert list(SafetensorsCheckpoint(tmp_path).tensors()) == names


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
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin, which are pickled .*: convert them to safetensors"
    ):
        SafetensorsCheckpoint(tmp_path)


def test_an_absent_tensor_and_a_file_that_vanished_are_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_folder(tmp_path))
    with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
        checkpoint.get("nothing")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        checkpoint.get("lm_head.weight")
