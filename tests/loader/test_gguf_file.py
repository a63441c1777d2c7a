from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loader.gguf_file import TENSOR_TYPES, GgufFile, read_metadata
from quire.types.errors import CheckpointError
from tests.loader.gguf_tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf("qwen2", path, quant="Q8_0")
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "damaged.gguf"


def header_size(path: Path) -> int:
    return min(tensor.offset for tensor in GgufFile(path).tensors.values())


def test_metadata_equals_what_gguf_py_reads(tiny: Path) -> None:
    reader = gguf.GGUFReader(tiny)
    expected = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(tiny) == expected
    assert len(expected["tokenizer.ggml.tokens"]) == 288


def test_arrays_of_strings_can_be_stepped_over(tiny: Path) -> None:
    whole, short = GgufFile(tiny), GgufFile(tiny, string_arrays=False)
    strings = {key for key, value in whole.metadata.items() if isinstance(value, list) and isinstance(value[0], str)}
    assert "tokenizer.ggml.tokens" in strings
    assert short.metadata == {key: value for key, value in whole.metadata.items() if key not in strings}
    assert short.tensors == whole.tensors


def test_tensors_and_their_bytes_equal_what_gguf_py_reads(tiny: Path) -> None:
    file = GgufFile(tiny)
    reader = gguf.GGUFReader(tiny)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.type, found.num_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        np.testing.assert_array_equal(file.data(found), tensor.data.reshape(-1).view(np.uint8))


def test_block_sizes_equal_those_of_gguf_py() -> None:
    expected = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {key: expected[key] for key in TENSOR_TYPES} == TENSOR_TYPES


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("flags", [True, False])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("texts", ["", "ä", "日本"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_metadata(path)
    del found["general.architecture"]
    assert found == {
        "u8": 200, "i8": -5, "u16": 60000, "i16": -300, "u32": 4_000_000_000, "i32": -70000, "u64": 2**63,
        "i64": -(2**40), "f32": 0.5, "f64": 0.1, "yes": True, "flags": [True, False], "numbers": [1, -2, 3],
        "texts": ["", "ä", "日本"],
    }  # fmt: skip


def raw_file(path: Path, *entries: bytes, num_tensors: int = 0, tensors: bytes = b"") -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries)) + b"".join(entries) + tensors)
    return path


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_a_string_that_is_not_utf8_keeps_its_bytes(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "odd.gguf", text(b"key") + struct.pack("<I", 8) + text(b"a\xffb"))
    assert read_metadata(path)["key"].encode("utf-8", "surrogateescape") == b"a\xffb"


def test_an_empty_array_is_read(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "empty.gguf", text(b"key") + struct.pack("<IIQ", 9, 4, 0))
    assert read_metadata(path) == {"key": []}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_is_refused(tiny: Path, scratch: Path, data: st.DataObject) -> None:
    whole = tiny.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in GgufFile(tiny).tensors.values())
    scratch.write_bytes(whole[: data.draw(st.integers(0, last - 1))])
    for string_arrays in (True, False):
        with pytest.raises(CheckpointError, match=r"damaged\.gguf .*(truncated|empty|not a GGUF)"):
            GgufFile(scratch, string_arrays=string_arrays)


def test_a_truncated_file_error_names_both_sizes(tiny: Path, scratch: Path) -> None:
    whole = tiny.read_bytes()
    scratch.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=f"at least {len(whole)} bytes but it has {len(whole) - 100}; down"):
        GgufFile(scratch)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_in_the_header_never_gives_another_error(tiny: Path, scratch: Path, data: st.DataObject) -> None:
    whole = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, header_size(tiny) - 1))] = data.draw(st.integers(0, 255))
    scratch.write_bytes(whole)
    for string_arrays in (True, False):
        with contextlib.suppress(CheckpointError):
            GgufFile(scratch, string_arrays=string_arrays)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a GGUF file: it starts with b'PK"):
        GgufFile(path)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(CheckpointError, match=f"version {version}|big-endian"):
        GgufFile(path)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="big-endian"):
        GgufFile(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="cannot read"):
        GgufFile(tmp_path)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "part.gguf", text(b"split.count") + struct.pack("<IH", 2, 3))
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*merge"):
        GgufFile(path)


def tensor_entry(name: bytes, dims: tuple[int, ...], type_id: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (tensor_entry(b"t", (4,), 99), "'t' has the unknown type number 99; known types: F32"),
        (tensor_entry(b"t", (33,), 8), "rows of 33 values, not a multiple of 32"),
        (tensor_entry(b"t", (1,) * 5, 0), "5 dimensions"),
        (tensor_entry(b"t", (2**40, 2**40), 0), "truncated: tensor 't' needs"),
    ],
)
def test_a_wrong_tensor_entry_is_refused(tmp_path: Path, entry: bytes, message: str) -> None:
    path = raw_file(tmp_path / "wrong.gguf", num_tensors=1, tensors=entry)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_a_tensor_listed_twice_is_refused(tmp_path: Path) -> None:
    entries = tensor_entry(b"t", (0,), 0) * 2
    path = raw_file(tmp_path / "twice.gguf", num_tensors=2, tensors=entries)
    path.write_bytes(path.read_bytes() + bytes(64))
    with pytest.raises(CheckpointError, match="'t' is listed twice"):
        GgufFile(path)


def test_reading_metadata_imports_no_torch(tiny: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from quire.loader.hub import ModelSource\n"
        "from quire.loader.model_config import load_config, load_generation_config\n"
        f"source = ModelSource(Path({str(tiny)!r}), 'gguf', 'tiny')\n"
        "assert load_config(source)['vocab_size'] == 288 and load_generation_config(source) == {}\n"
        "heavy = {'torch', 'huggingface_hub', 'rich', 'transformers', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
