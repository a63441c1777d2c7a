"""Models in Quire's own folder, by name: what was downloaded into it, and what people have put there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config import env
from quire.loader.aliases import ALIASES

_LATEST = ":latest"


@dataclass(frozen=True)
class LocalModel:
    """A model that lies in Quire's folder."""

    name: str
    path: Path  # a .gguf file, or a folder
    kind: Literal["folder", "gguf"]

    @property
    def num_bytes(self) -> int:
        files = [self.path] if self.path.is_file() else [path for path in self.path.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)


def models_folder() -> Path:
    """Where downloads go, and where a .gguf file may be put to be known by its name."""
    return env.cache_dir() / "models"


def local_models() -> list[LocalModel]:
    """By name. A folder is one if it has a config.json or exactly one .gguf file."""
    folder = models_folder()
    if not folder.is_dir():
        return []
    built_in = {model.file_name: alias for alias, model in ALIASES.items()}
    found = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_file() and path.suffix.lower() == ".gguf":
            found.append(LocalModel(built_in.get(path.name, path.stem), path, "gguf"))
        elif path.is_dir() and (path / "config.json").is_file():
            found.append(LocalModel(built_in.get(path.name, path.name), path, "folder"))
        elif path.is_dir() and len(files := list(path.glob("*.gguf"))) == 1:
            found.append(LocalModel(path.name, files[0], "gguf"))
    return sorted(found, key=lambda model: model.name.lower())


def find_local(name: str) -> LocalModel | None:
    """The model of this name; upper case matters only between names that differ in nothing else."""
    if not name or "/" in name:
        return None
    wanted = name.removesuffix(_LATEST).removesuffix(".gguf")
    models = local_models()
    exact = [model for model in models if model.name == wanted]
    alike = exact or [model for model in models if model.name.lower() == wanted.lower()]
    return alike[0] if len(alike) == 1 else None
