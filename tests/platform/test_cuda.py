"""GPUs that are too old are refused by name, and so is a folder that kernels cannot be written to. None is needed."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.layers.quant.online import Fp8Matmuls
from quire.ops.base import Target
from quire.platform import cuda
from quire.platform.cuda import CudaPlatform, PinnedCopy
from quire.types.errors import ConfigError
from tests.kernels.triton.paged import needs_triton


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5.*8\.0 or newer; set --device cpu"):
        CudaPlatform().start(None)
    pretend(monkeypatch, "NVIDIA A100", (8, 0))
    CudaPlatform().start(None)


@needs_triton
def test_kernels_need_a_folder_with_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "NVIDIA H200", (9, 0))
    good, file = tmp_path / "new" / "folder", tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(good))
    CudaPlatform().start(None)
    assert list(good.iterdir()) == [], "nothing stays"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "inside"))
    with pytest.raises(ConfigError, match=r"file/inside \(Not a directory\); set TRITON_CACHE_DIR"):
        CudaPlatform().start(None)


@needs_triton
def test_kernels_that_are_there_may_be_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image may bring its kernels in a folder that nobody writes to."""
    pretend(monkeypatch, "NVIDIA H200", (9, 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def refuse(**options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        CudaPlatform().start(None)
    (tmp_path / "kernel").mkdir()
    CudaPlatform().start(None)
    assert "(Read-only file system); set TRITON_CACHE_DIR" in caplog.text


@needs_triton
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_without_eight_bit_floats_keeps_others(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    from quire.attention.triton import TritonAttention

    target = Target("cuda", torch.bfloat16, deterministic=deterministic)
    pretend(monkeypatch, "NVIDIA A100", (8, 0))
    reason = Fp8Matmuls().refuses(target)
    assert reason is not None
    assert "NVIDIA A100 has 8.0" in reason
    assert reason.endswith("leave --quantization out")
    assert TritonAttention().kv_dtypes(torch.bfloat16) == (torch.bfloat16,)
    pretend(monkeypatch, "NVIDIA L40S", (8, 9))
    assert Fp8Matmuls().refuses(target) is None
    assert TritonAttention().kv_dtypes(torch.bfloat16) == (torch.bfloat16, torch.float8_e4m3fn)


def test_slots_of_adapters_are_not_kept_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cleared by sleep anyway: they come back as zeros, and no memory is pinned for them."""
    pinned: list[torch.Tensor] = []

    def take() -> torch.Tensor:
        pinned.append(torch.empty(64, dtype=torch.uint8))
        return pinned[-1]

    monkeypatch.setattr(cuda, "_pinned_chunk", take)
    monkeypatch.setattr(cuda, "_CHUNK", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    unpinned: list[int] = []
    cudart = SimpleNamespace(cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    weight, table, slots = torch.arange(20.0), torch.arange(4.0), torch.ones(1000)
    kept = [{t.data_ptr(): t.untyped_storage() for t in group} for group in ([weight], [table, slots], [slots])]
    copy = PinnedCopy(*kept)
    assert len(pinned) == 2, "96 bytes of weight and table"
    for _ in range(2):
        copy.move()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (weight, table, slots))
        copy.put_back()
        assert (weight.tolist(), table.tolist()) == ([*range(20)], [*range(4)])
        assert not slots.any()
    del copy
    assert len(unpinned) == 2
