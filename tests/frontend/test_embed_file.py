"""quire embed: vectors of a file's texts, in a file, going on where an earlier run stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.cli.main import main
from quire.frontend.embed_file import EmbedJob, embed_file
from quire.types.errors import ConfigError, RequestError


class Embedder:
    """The vector of a text is its length and its first letter; the engine dies at `dies_at`."""

    def __init__(self, dies_at: str | None = None) -> None:
        self.seen: list[str] = []
        self._dies_at = dies_at

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        if self._dies_at in texts:
            raise KeyboardInterrupt
        self.seen += texts
        return np.array([[len(text), ord(text[0])] for text in texts], np.float32)


def job(folder: Path, lines: list[Any], out: str = "v.npy", **settings: Any) -> EmbedJob:
    source = folder / "texts.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines))
    return EmbedJob(source, folder / out, "text", {"model": "m", **settings}, batch_size=2)


def test_texts_and_objects_become_rows(tmp_path: Path) -> None:
    work = job(tmp_path, ["a", {"text": "bc"}, "def"])
    assert embed_file(work, Embedder(), show=False) == (3, 0)
    assert np.load(work.out).tolist() == [[1, 97], [2, 98], [3, 100]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl", "v.npy"]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lines = ["a", "bb", "ccc", "dddd", "eeeee"]
    work = job(tmp_path, lines)
    with pytest.raises(KeyboardInterrupt):
        embed_file(work, Embedder(dies_at="eeeee"), show=False)
    with work.part.open("ab") as part:
        part.write(b"\0" * 5)  # killed while it wrote
    again = Embedder()
    assert embed_file(work, again, show=False) == (5, 4)
    assert again.seen == ["eeeee"]
    assert np.load(work.out)[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_run_with_other_texts_or_settings_is_not_continued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        embed_file(job(tmp_path, ["a", "b", "c"]), Embedder(dies_at="c"), show=False)
    with pytest.raises(ConfigError, match="another model; remove it"):
        embed_file(job(tmp_path, ["a", "b", "c"], model="other"), Embedder(), show=False)
    with pytest.raises(ConfigError, match="another source; remove it"):
        embed_file(job(tmp_path, ["a", "b", "d"]), Embedder(), show=False)


def test_a_parquet_file_has_a_column_of_vectors(tmp_path: Path) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="pyarrow is an extra: pip install 'quire[parquet]' runs this test"
    )
    work = job(tmp_path, ["a", "bc", "def"], out="v.parquet")
    with pytest.raises(KeyboardInterrupt):
        embed_file(work, Embedder(dies_at="def"), show=False)
    assert embed_file(work, Embedder(), show=False) == (3, 2)
    assert parquet.read_table(work.out).to_pydict() == {"vector": [[1, 97], [2, 98], [3, 100]]}


@pytest.mark.parametrize("line", [3, "", {"words": "x"}])
def test_a_line_without_a_text_is_named(line: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 2 of .* has no text"):
        embed_file(job(tmp_path, ["a", line]), Embedder(), show=False)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"], "nothing was begun"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.jsonl", "--out", "v.npy"], "missing.jsonl is not a file"),
        (["texts.jsonl", "--out", "v.csv"], "must end in .npy or .parquet"),
        (["texts.jsonl", "--out", "texts.npy"], "is there already"),
        (["texts.jsonl", "--out", "v.npy", "--batch-size", "0"], "at least 1"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('"a"\n')
    Path("texts.npy").touch()
    assert main(["embed", *arguments]) == 1
    assert words in capsys.readouterr().err
