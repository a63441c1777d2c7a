"""Vectors of a file's texts, as a file: in parts, so that work that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quire.frontend.progress import NullProgress, make_progress
from quire.types.errors import ConfigError, RequestError

Embed = Callable[[list[str]], NDArray[np.float32]]
"""Texts to their vectors [texts, size]."""


@dataclass(frozen=True)
class EmbedJob:
    source: Path
    out: Path
    field: str  # of an object in a line, the one that is the text
    settings: dict[str, Any]  # what vectors depend on, besides the texts
    batch_size: int = 1024

    @property
    def part(self) -> Path:
        """Vectors so far, as float32 one after the other."""
        return self.out.with_name(self.out.name + ".part")

    @property
    def note(self) -> Path:
        """What they are of."""
        return self.out.with_name(self.out.name + ".part.json")

    def check(self) -> None:
        """Say what is wrong before a model is loaded."""
        if not self.source.is_file():
            raise ConfigError(f"{self.source} is not a file; give one with a JSON text or object in each line")
        if self.out.suffix not in (".npy", ".parquet"):
            raise ConfigError(f"--out is {self.out}, which must end in .npy or .parquet")
        if self.out.exists():
            raise ConfigError(f"{self.out} is there already; remove it, or give another --out")
        if self.out.suffix == ".parquet":
            _pyarrow()
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size is {self.batch_size} but must be at least 1")


def embed_file(job: EmbedJob, embed: Embed, *, show: bool = True) -> tuple[int, int]:
    """Write the vectors; returns how many there are and how many of them were there from an earlier run."""
    total, digest = _survey(job.source)
    if not total:
        raise ConfigError(f"{job.source} has no lines; there is nothing to embed")
    wanted = {"source": digest, "field": job.field, **job.settings}
    size, done = _earlier(job, wanted)
    first = done
    with (
        _kept_if_begun(job.part),
        job.part.open("r+b" if done else "wb") as part,
        _progress(total - done, show) as progress,
    ):
        part.truncate(done * size * 4)
        part.seek(0, 2)
        texts = islice(read_texts(job.source, job.field), done, None)
        while batch := list(islice(texts, job.batch_size)):
            vectors = embed(batch)
            if not done:
                size = vectors.shape[1]
                job.note.write_text(json.dumps({**wanted, "size": size}))
            part.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
            part.flush()
            done += len(batch)
            progress.advance(len(batch), 0)
    _finish(job, done, size)
    return done, first


@contextmanager
def _kept_if_begun(part: Path) -> Iterator[None]:
    """Leave no empty file behind where nothing was embedded."""
    try:
        yield
    finally:
        if part.exists() and not part.stat().st_size:
            part.unlink()


def read_texts(path: Path, field: str) -> Iterator[str]:
    """Of each line: a JSON text, or the field of a JSON object."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RequestError(f"line {number} of {path} is not JSON: {error}; correct it") from error
            text = value.get(field) if isinstance(value, dict) else value
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"line {number} of {path} has no text: it must be a JSON string, or an object with a string"
                    f" {field!r} that is not empty (see --field)"
                )
            yield text


def _survey(path: Path) -> tuple[int, str]:
    """The number of lines, and a digest of them all."""
    digest, count, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            count += chunk.count(b"\n")
            last = chunk[-1:]
    return count + (last != b"\n"), digest.hexdigest()


def _earlier(job: EmbedJob, wanted: dict[str, Any]) -> tuple[int, int]:
    """(the size of a vector, how many there are) of an earlier run with the same texts and settings."""
    if not job.note.exists() or not job.part.exists():
        return 0, 0
    found = json.loads(job.note.read_text())
    size = int(found.pop("size"))
    different = next((name for name in wanted if found.get(name) != wanted[name]), None)
    if different is not None:
        raise ConfigError(
            f"{job.part} is of an earlier run with another {different}; remove it and {job.note.name}, or give"
            " another --out"
        )
    return size, job.part.stat().st_size // (size * 4)


def _progress(total: int, show: bool) -> AbstractContextManager[NullProgress]:
    return make_progress(total, True) if show else nullcontext(NullProgress())


def _finish(job: EmbedJob, count: int, size: int) -> None:
    """Make the file of the vectors, which appears when it is whole."""
    unfinished = job.out.with_name(job.out.name + ".new")
    if job.out.suffix == ".npy":
        with unfinished.open("wb") as file, job.part.open("rb") as part:
            _write_header(file, (count, size))
            shutil.copyfileobj(part, file, 1 << 20)
    else:
        arrow, parquet = _pyarrow()
        vectors = np.memmap(job.part, "<f4", "r", shape=(count, size))
        column = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.reshape(-1)), size)
        parquet.write_table(arrow.table({"vector": column}), unfinished)
    unfinished.replace(job.out)
    job.part.unlink()
    job.note.unlink()


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "--out ends in .parquet, which needs pyarrow: pip install 'quire[parquet]', or use .npy"
        ) from error
