"""quire pull, list, show and rm: models by name, and nothing deleted outside of Quire's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli import list as list_command
from quire.cli.main import main
from quire.loader.hub import resolve_model
from quire.types.errors import ModelNotFoundError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(list_command, "hub_entries", list)
    folder = tmp_path / "models"
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "Dropped-Q4.gguf").write_bytes(b"GGUF")
    (folder / ".fetch-1").mkdir()
    (folder / "notes.txt").touch()
    return folder


def test_list_names_what_is_there(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", "Dropped-Q4", "tiny"]
    assert main(["list", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["Dropped-Q4", "tiny"]


def test_a_dropped_file_is_found_by_its_name(models: Path) -> None:
    for name in ("Dropped-Q4", "dropped-q4", "dropped-q4:latest", "Dropped-Q4.gguf"):
        assert resolve_model(name).path == models / "Dropped-Q4.gguf"
    assert resolve_model("tiny").path == models / "tiny"
    with pytest.raises(ModelNotFoundError, match="did you mean tiny"):
        resolve_model("tinyy")


def test_show(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "architecture      LlamaForCausalLM" in out
    assert "context length    256" in out
    assert main(["show", "smollm2"]) == 1
    assert "`quire pull smollm2` downloads it" in capsys.readouterr().err


def test_rm_deletes_inside_of_its_folder_alone(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text(json.dumps(CONFIG))
    (models / "link").symlink_to(outside)
    for name in (str(outside), "../outside", "..", "", "models/tiny", "some/model"):
        assert main(["rm", name]) == 1
        assert "the only place that this deletes from" in capsys.readouterr().err
    assert main(["rm", "dropped-q4", "link"]) == 0
    assert "deleted Dropped-Q4 (4B)" in capsys.readouterr().out
    assert (outside / "config.json").is_file()
    assert sorted(path.name for path in models.iterdir()) == [".fetch-1", "notes.txt", "tiny"]
    assert main(["rm", "tiny", "nothing"]) == 1  # none of them, if one is not there
    assert (models / "tiny").is_dir()


def test_pull_says_where_the_model_is(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "tiny"]) == 0
    assert capsys.readouterr().out == f"tiny is in {models / 'tiny'}\n"
