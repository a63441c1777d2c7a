"""`quire rm MODEL`: delete a model from Quire's own folder, and from nowhere else."""

from __future__ import annotations

import argparse
import shutil

from quire.loader.local import LocalModel, find_local, local_models, models_folder
from quire.types.errors import ModelNotFoundError
from quire.utils.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="a name of `quire list` that lies in Quire's folder"
    )


def run(args: argparse.Namespace) -> int:
    for model in [own_model(name) for name in args.models]:
        size = model.num_bytes
        delete(model)
        print(f"deleted {model.name} ({format_bytes(size)})")
    return 0


def own_model(name: str) -> LocalModel:
    found = find_local(name)
    if found is None:
        folder, names = models_folder(), ", ".join(model.name for model in local_models())
        why = f"there are: {names}" if names else "it is empty"
        raise ModelNotFoundError(
            f"no model {name!r} in {folder}, the only place that this deletes from ({why}); models of the hub's cache"
            " are deleted with `hf cache rm`"
        )
    return found


def delete(model: LocalModel) -> None:
    """Remove what stands in the folder under the model's name; a link goes, what it points to stays."""
    folder = models_folder()
    entry = folder / model.path.relative_to(folder).parts[0]
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
