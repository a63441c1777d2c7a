"""What a model folder says of pooling: the files of sentence-transformers, and the architecture. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.config.groups import ModelConfig
from quire.loader.hub import ModelSource
from quire.loader.model_config import read_optional_json
from quire.types.errors import CheckpointError, ConfigError
from quire.types.pooling import PoolerConfig
from quire.types.sampling import PoolingKind
from quire.utils.schema import decode_json

_MODULES = "modules.json"
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class _Module(msgspec.Struct):
    """An entry of modules.json: a step from a text to its vector."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class _Settings(msgspec.Struct):
    """config_sentence_transformers.json and sentence_bert_config.json, as far as they are read."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    max_seq_length: int | None = None


def read_pooler(
    config: ModelConfig, source: ModelSource, *, size: int, generates: bool, is_encoder: bool
) -> PoolerConfig | None:
    """How the model is to pool; None if it is to generate. `generates`: whether the architecture can."""
    has_modules = source.kind == "folder" and (source.path / _MODULES).is_file()
    runner = config.runner
    if runner == "auto":
        runner = "pooling" if config.convert == "embed" or has_modules or not generates else "generate"
    if runner == "generate":
        if config.convert == "embed":
            raise ConfigError("convert is 'embed' but runner is 'generate'; set --runner pooling, or leave one out")
        if not generates:
            raise ConfigError(
                f"runner is 'generate' but {source.name!r} is a model that only pools; set --runner auto"
            )
        return None
    kind: PoolingKind = "cls" if is_encoder else "last"
    if not has_modules:
        return PoolerConfig(kind, size)
    modules = _read_modules(source.path)
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    if pooling is not None:
        kind = _read_kind(_inside(source.path, pooling.path) / "config.json", kind)
    settings = _read_settings(source.path)
    return PoolerConfig(
        kind,
        size,
        normalize=any(module.kind == "Normalize" for module in modules),
        prompts=settings.prompts,
        default_prompt=settings.default_prompt_name,
        max_tokens=settings.max_seq_length,
    )


def _read_modules(folder: Path) -> list[_Module]:
    path = folder / _MODULES
    try:
        modules = msgspec.convert(decode_json(path.read_bytes()), list[_Module])
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; download it again") from error
    unknown = [module.kind for module in modules if module.kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ConfigError(
            f"{path} has a module {unknown[0]!r}, which Quire does not run; it runs Transformer, Pooling, Normalize"
        )
    return modules


def _inside(folder: Path, path: str) -> Path:
    """A module's folder, which a file names and which has to be below the model's."""
    found = (folder / path).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / _MODULES} names the path {path!r}, which is outside of it; correct it")
    return found


def _read_kind(path: Path, otherwise: PoolingKind) -> PoolingKind:
    described = read_optional_json(path)
    if described.get("include_prompt") is False:
        raise ConfigError(
            f"{path} leaves the prompt out of the pooled tokens (include_prompt), which Quire does not do"
        )
    chosen = [name for name, value in described.items() if name.startswith("pooling_mode_") and value is True]
    if not chosen:
        named = described.get("pooling_mode")
        chosen = [f"pooling_mode_{named}", f"pooling_mode_{named}_tokens", f"pooling_mode_{named}_token"]
        known = [name for name in chosen if name in _MODES]
        if named is None:
            return otherwise
        chosen = known or chosen[:1]
    if len(chosen) > 1 or chosen[0] not in _MODES:
        raise ConfigError(
            f"{path} pools by {', '.join(chosen)}, which Quire does not do; it does {', '.join(_MODES)}, one of them"
        )
    return _MODES[chosen[0]]


def _read_settings(folder: Path) -> _Settings:
    found: dict[str, Any] = {}
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json"):
        found |= {key: value for key, value in read_optional_json(folder / name).items() if value is not None}
    try:
        settings = msgspec.convert(found, _Settings)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the files of sentence-transformers in {folder} cannot be used: {error}") from error
    if settings.default_prompt_name is not None and settings.default_prompt_name not in settings.prompts:
        raise CheckpointError(
            f"config_sentence_transformers.json in {folder} names the prompt {settings.default_prompt_name!r}, which"
            " it does not have; correct it"
        )
    return settings
