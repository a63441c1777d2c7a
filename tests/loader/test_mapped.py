"""Mapped files: what was touched is in memory until it is released, and can be read again."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.loader.mapped import MappedFile
from quire.types.errors import CheckpointError

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def resident(path: Path) -> int:
    """Bytes of the file's mappings in this process that are in memory."""
    sizes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            sizes += int(line.split()[1]) * 1024
    return sizes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    return path


@needs_proc
def test_released_bytes_leave_memory_and_can_be_read_again(path: Path) -> None:
    file = MappedFile(path)
    assert resident(path) == 0
    before = file.view(0, file.size).copy()
    assert resident(path) == file.size
    file.release(0, 3 * (file.size // 4))
    assert resident(path) <= file.size // 4
    np.testing.assert_array_equal(file.view(0, file.size), before)
    file.release(0, file.size)
    assert resident(path) == 0


@settings(max_examples=50)
@given(start=st.integers(0, 5 * mmap.PAGESIZE), size=st.integers(0, 3 * mmap.PAGESIZE))
def test_any_part_can_be_released(tmp_path_factory: pytest.TempPathFactory, start: int, size: int) -> None:
    path = tmp_path_factory.getbasetemp() / "any.bin"
    if not path.exists():
        path.write_bytes(bytes(range(256)) * (8 * mmap.PAGESIZE // 256))
    file = MappedFile(path)
    view = file.view(start, size)
    before = view.copy()
    file.release(start, size)
    np.testing.assert_array_equal(view, before)


def test_the_file_itself_never_changes(path: Path) -> None:
    before = path.read_bytes()
    file = MappedFile(path)
    file.view(0, 10)[:] = 0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read .*; check the path"), (b"", "is empty; download")]
)
def test_what_cannot_be_mapped_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "weights.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        MappedFile(path)
