from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.loader import hub
from quire.loader.aliases import ALIASES, DEFAULT_MODEL
from quire.loader.hub import ModelSource, resolve_model
from quire.types.errors import DiskSpaceError, DownloadError, ModelNotFoundError


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_folder_with_a_config(model_folder: Path) -> None:
    assert resolve_model(str(model_folder)) == ModelSource(model_folder, "folder", str(model_folder))


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.touch()
    assert resolve_model(str(path)) == ModelSource(path, "gguf", str(path))
    assert resolve_model(str(tmp_path)) == ModelSource(path, "gguf", str(tmp_path))


def test_a_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"has 2 \.gguf files \(a\.gguf, b\.gguf\); give the path of one"):
        resolve_model(str(tmp_path))


def test_a_folder_with_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has neither a config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"model\.bin' is not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["smollm", "./none", "/nowhere/model", "a/b/c", "", "org/file.gguf", "../x"])
def test_a_name_of_nothing_says_where_it_was_looked_for(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    if name:
        message = str(caught.value)
        assert repr(name) in message
        assert str(Path(name).absolute()) in message
        assert "smollm2" in message


def test_the_default_model_is_fetched_once_per_machine() -> None:
    source = resolve_model(DEFAULT_MODEL)
    alias = ALIASES[DEFAULT_MODEL]
    assert (source.kind, source.name, source.path.name) == ("gguf", "smollm2", alias.file_name)
    with source.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == alias.file_sha256


def test_an_alias_wins_over_a_folder_that_is_no_model(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "fetched.gguf"
    monkeypatch.setattr(hub, "fetch_wheel_model", lambda alias: fetched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_model("smollm2").path == fetched
    (tmp_path / "smollm2" / "config.json").touch()
    assert resolve_model("smollm2").path == Path("smollm2")


def use_hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> list[dict[str, Any]]:
    """Replace the hub; returns what it will have been asked for."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **arguments: Any) -> str:
        calls.append({"repo_id": repo_id, **arguments})
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id_is_downloaded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use_hub(monkeypatch, model_folder)
    assert resolve_model("org/name", "v1") == ModelSource(model_folder, "folder", "org/name")
    assert (calls[0]["repo_id"], calls[0]["revision"]) == ("org/name", "v1")
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(calls[0]["allow_patterns"])


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("404 Client Error",)
    return error


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (
            errors.LocalEntryNotFoundError("Got: ConnectError\nmore"),
            ModelNotFoundError,
            r"no model 'org/name': no folder .*org/name, not in the cache .*, and the hub gave no answer "
            r"\(Got: ConnectError\); connect to the network, or give a local folder",
        ),
        (errors.OfflineModeIsEnabled("offline"), ModelNotFoundError, r"no answer \(offline\)"),
        (http_error(errors.RepositoryNotFoundError), ModelNotFoundError, "the hub does not know it; check the spell"),
        (http_error(errors.RevisionNotFoundError), ModelNotFoundError, "has no revision 'v1' on the hub"),
        (http_error(errors.GatedRepoError), DownloadError, "gated model: accept its terms"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskSpaceError, "HF_HOME"),
    ],
)
def test_a_hub_that_does_not_give_the_model(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, expected: type[Exception], message: str
) -> None:
    use_hub(monkeypatch, answer)
    with pytest.raises(expected, match=message):
        resolve_model("org/name", "v1")


def test_a_hub_repository_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"'org/name' has no config\.json; if it holds \.gguf files"):
        resolve_model("org/name")
